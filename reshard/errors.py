"""Every error that reshard raises; each says what was given, what is wrong, and what to do."""

from __future__ import annotations


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


class TileError(ReshardError):
    """Tiles given to a runtime that are not the source layout's."""


class BudgetError(ReshardError):
    """A memory budget that no plan meets; `smallest` is the least one that can be met, in bytes."""

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest
