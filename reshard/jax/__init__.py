"""reshard for JAX programs.

    redistribute(x, sharding)    moves an array, or a tree of arrays; replaces `device_put` and sharding constraints
    reshard_pytree(tree, target) moves a tree as one, within one budget, once all processes agree on it
    Target(sharding, view=...)   a sharding, and the view and dtype of the array on it: for a leaf of a tree of targets,
                                 which may name the array that it reads (source=), or several (parts=)
    Part(source, into=...)       one of the arrays that fill a Target together
    named_targets(table, ...)    the Targets that a table of names makes of a tree of arrays
    move_tile(tile, a, b)        moves a device's tile, inside a `jax.shard_map`, between layouts of any kind
    jit(f)                       `jax.jit` with the pass inside XLA switched on for this function
    enable(), disable()          switch the pass on and off inside XLA, for every `jax.jit` of the process
    enabled()                    a context in which it is on
    transform(program)           a pass on a StableHLO module, before partitioning
    autoshard(f, mesh, *shapes)  which shardings a step should have, and its program, which moves as planned
    LayoutChoice                 what `autoshard` returns: shardings, program, figures, reasons
    load_step(program, mesh)     a program that `reshard autoshard -o` wrote, as a function
    calibrate()                  measures the links and the speed of the devices, and plans for them from then on
    report(f)(*args)             how XLA moves data in a function's program, and what is lost by that
    show(array)                  prints which device holds what of a live array
    strict()                     a context that refuses programs that rebuild a whole array
    deserialize(data)            a compiled program from the bytes of its `serialize()`

`advise` searches for the shardings to change, for `report(f)(*args).advise()`.

`loading` makes arrays of files for `reshard.files.load`: what processes read for each other lies in memory
that they share, `share_host_memory`, or comes from other hosts by `process_exchange`.

Moves are in the modules beside this one, those to other devices in `crossing`; the pass inside XLA is `xla_pass`, and
the one on StableHLO `stablehlo_pass`; `layout_choice` has what `autoshard` does. `autoshard`, `jit` and `redistribute`
are functions here; their modules are reached by `from reshard.jax.jit import ...`.
"""

try:
    import jax as _jax
except ModuleNotFoundError as _error:
    if _error.name != "jax":
        raise
    raise ImportError("reshard.jax needs jax: pip install jax") from None

if tuple(map(int, _jax.__version__.split(".")[:2])) < (0, 11):  # An older jax hands no compiled module to a pass.
    raise ImportError(f"reshard.jax needs jax 0.11 or later, and this is jax {_jax.__version__}: pip install -U jax")

from reshard.jax.jit import deserialize as deserialize
from reshard.jax.jit import jit as jit
from reshard.jax.jit import strict as strict
from reshard.jax.layout_choice.autoshard import LayoutChoice as LayoutChoice
from reshard.jax.layout_choice.autoshard import autoshard as autoshard
from reshard.jax.layout_choice.calibration import calibrate as calibrate
from reshard.jax.layout_choice.wrap_module import load_step as load_step
from reshard.jax.placement import Part as Part
from reshard.jax.placement import Target as Target
from reshard.jax.placement import named_targets as named_targets
from reshard.jax.program_report import report as report
from reshard.jax.program_report import show as show
from reshard.jax.redistribute import redistribute as redistribute
from reshard.jax.redistribute import reshard_pytree as reshard_pytree
from reshard.jax.stablehlo_pass.module_pass import transform as transform
from reshard.jax.traced import move_tile as move_tile
from reshard.jax.xla_pass.xla_hook import disable as disable
from reshard.jax.xla_pass.xla_hook import enable as enable
from reshard.jax.xla_pass.xla_hook import enabled as enabled
