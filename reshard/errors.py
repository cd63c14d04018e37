"""Every error that reshard raises; each says what was given, what is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager


class ReshardError(ValueError):
    """The root of all errors of this package."""


class MeshError(ReshardError):
    """A mesh, an axis or a sub-axis that cannot be, or two meshes that do not fit together."""


class LayoutError(ReshardError):
    """A layout that breaks one of the invariants of `docs/language.md`."""


class NotationError(ReshardError):
    """Text in one of the notations (ours, JAX, Shardy, HLO) that does not parse."""


class StepError(ReshardError):
    """A step that its typing rule refuses."""


class PlanError(ReshardError):
    """A request or a chain of steps that is no redistribution."""


class NetworkError(ReshardError):
    """A network description that is incomplete or out of range."""


class ProgramError(ReshardError):
    """A StableHLO program that does not parse, or that the compiler pass cannot work on."""


class StrictError(ReshardError):
    """A compiled module that still rebuilds an array, or exceeds its budget, under strict mode."""


class TileError(ReshardError):
    """Tiles given to a runtime that are not the source layout's."""


class AgreementError(ReshardError):
    """Ranks that call one collective operation with different requests; raised on all of them."""


class RankError(ReshardError):
    """A rank that failed, or did not answer in time, while data were moving; raised on all that are left."""


class ProofError(ReshardError):
    """A plan's program that is wrong; `counterexample` says where, and the numpy runtime confirmed it."""

    def __init__(self, message: str, counterexample: object) -> None:
        super().__init__(message)
        self.counterexample = counterexample


class UndecidedError(ReshardError):
    """A claim of a proof that was neither proved nor refuted; the message says which, and why."""


class BudgetError(ReshardError):
    """A memory budget that no plan meets; `smallest` is the least one that can be met, in bytes."""

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@contextmanager
def about_sharding(source: str, shape: Sequence[int]) -> Generator[None]:
    """Adds a sharding's text and the global shape to an error."""
    try:
        yield
    except ReshardError as error:
        shown = source if len(source) <= 300 else source[:297] + "..."
        raise type(error)(f"sharding {shown!r} of an array of global shape {tuple(shape)}: {error}") from None
