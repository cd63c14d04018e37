"""What a compiled program does to move data between devices, and what reshard would do instead.

    report = examine(compiled.as_text())
    for place in report.places:
        print(place.where, place.does, place.received_bytes, place.needed_bytes, place.rebuilds)
    print(report)

`reshard doctor FILE` and `reshard.jax.report(f)(*args)` are made of it. The data is followed through the module:
`flow` sees through fusions and tuples, `movement` knows the instructions that only move, `chains` joins these into
places, `trace` follows elements back through them, and `digits` reads the layouts off that.
"""

from reshard.doctor.examine import examine as examine
from reshard.doctor.report.model import Compiled as Compiled
from reshard.doctor.report.model import Known as Known
from reshard.doctor.report.model import Move as Move
from reshard.doctor.report.model import Place as Place
from reshard.doctor.report.model import Report as Report
