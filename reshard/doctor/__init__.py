"""What a compiled program does to move data between devices, and what reshard would do instead.

    report = examine(compiled.as_text())
    for place in report.places:
        print(place.where, place.does, place.received_bytes, place.needed_bytes, place.rebuilds)
    print(report)

`reshard doctor FILE` and `reshard.jax.report(f)(*args)` are built on it.

    `examine` reads a compiled program and returns its `Report`: a table, JSON or a page.
    `Place` is one place where data moves, `ArrayMove` one array that moves there, before and after.
    `Advice` is which shardings to change, each a `Change` with what was measured of it; `Cause` is one beside a place.
    `Known` is a move that the program is known to ask for, which `examine` recognizes.
    `CompiledMemory` is the compiler's own account of the program's memory.

Both the report and the pass inside XLA follow values through the module by `dataflow`. The steps of an examination:

    chain_reader   joins collectives and the local moves between them, and reads each chain, for the report and for the
                   pass: where data enters it, the values that are used, the moves between, the known ones that match
                   them, and whether it surely wastes nothing
    infer_layouts  reads the layouts before and after a chain off its elements
    shifts         where no two layouts say it: a result as boxes of neighbours' tiles, and what devices exchange for
                   all results of one array
    rebuilds       finds the arrays that all devices come to have, though each uses a part
    live_bytes     adds up the memory on the way, and that of the whole program
    examination    makes the places (`places`) and the report

What the pass does with chains:

    proposals      the chains that plans could replace, each with its outcome; the doctor asks it too
    sums           sums of sums, planned together in the rounds in which the program adds up
    batch_ops      operations on rows, such as an FFT, that each device could run on its own rows, and where rows may be
    equivalence    whether the rewritten module still computes what it did; proves equal chains once

`advice` says which shardings to change: `report.advise()`, which needs the program as StableHLO and jax.
`xla_log` reads XLA's own warnings in a log instead of a program, and reports them.
"""

from reshard.doctor.advice import Advice as Advice
from reshard.doctor.advice import Change as Change
from reshard.doctor.examination import examine as examine
from reshard.doctor.places import ArrayMove as ArrayMove
from reshard.doctor.places import Cause as Cause
from reshard.doctor.places import Known as Known
from reshard.doctor.places import Place as Place
from reshard.doctor.report import Report as Report
from reshard.doctor.report.findings import CompiledMemory as CompiledMemory
