"""A corpus of programs, at least one for each operation of the StableHLO dialect: what XLA gets after the pass.

`worker` puts the operations between two reshards that the pass takes over, and compiles the program before and after
the pass. It is a process of its own, because a fault in a compiler ends the process.
"""

from tests.jax.stablehlo import collectives, control, elementwise, shapes
from tests.jax.stablehlo.base import OpCase as OpCase

CASES: tuple[OpCase, ...] = (*elementwise.CASES, *shapes.CASES, *control.CASES, *collectives.CASES)
BY_TITLE = {case.title: case for case in CASES}

# Cases are compiled in groups, to compile fewer programs.
_SIZE = 8


def groups() -> list[list[OpCase]]:
    """All cases: those that plain JAX cannot compile, and those that stand alone, one by one; the others together."""
    together = [case for case in CASES if not (case.alone or case.refused)]
    single = [[case] for case in CASES if case.alone or case.refused]
    return [*(together[at : at + _SIZE] for at in range(0, len(together), _SIZE)), *single]
