"""Strict mode: refuses a compiled program that still rebuilds a whole array, or needs too much memory."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from reshard import hlo
from reshard.errors import StrictError
from reshard.hlo import Collective
from reshard.jax.pass_report import PassReport, Reshard
from reshard.types import dtypes


class Limits(NamedTuple):
    """What a compiled program may do: rebuild arrays or not, and use `max_bytes` of temporary memory per device."""

    rebuild: bool = True
    max_bytes: int | None = None


_limits: ContextVar[Limits] = ContextVar("reshard_limits", default=Limits())  # noqa: B039 (it is immutable)


@contextmanager
def strict(*, max_bytes: int | None = None) -> Generator[None]:
    """A context in which `reshard.jax.jit` raises `StrictError` for a program that still rebuilds an array.

    A program rebuilds an array if it gathers all of it on every device although it only had to move tiles to other
    tiles. With `max_bytes`, programs that need more temporary memory than that on a device are refused, too. In nested
    contexts the tighter limits hold.

    >>> from reshard.jax import jit
    >>> with strict(max_bytes=1 << 20):
    ...     print(jit(lambda x: x + 1)(2.0))
    3.0
    """
    token = _limits.set(effective_limits(Limits(False, max_bytes)))
    try:
        yield
    finally:
        _limits.reset(token)


def effective_limits(own: Limits) -> Limits:
    """The tighter of a function's own limits and those of the current context."""
    context = _limits.get()
    bounds = [bound for bound in (own.max_bytes, context.max_bytes) if bound is not None]
    return Limits(own.rebuild and context.rebuild, min(bounds, default=None))


def check(text: str, report: PassReport, limits: Limits, temp_bytes: int = 0) -> None:
    """Raises `StrictError`, naming the user's line, if a compiled module exceeds the limits.

    `text` is the module's HLO, `temp_bytes` its temporary memory on a device. The module rebuilds an array if it
    gathers, on each device, the whole array of a reshard in the report whose source and target are both split.
    """
    for reshard, gather in [] if limits.rebuild else rebuilding_gathers(text, report):
        raise StrictError(_rebuild_message(reshard, gather))
    if limits.max_bytes is not None and temp_bytes > limits.max_bytes:
        raise StrictError(
            f"the program needs {temp_bytes} B of temporary memory on a device, and max_bytes allows "
            f"{limits.max_bytes} B; its reshards:\n{report}"
        )


def rebuilding_gathers(text: str, report: PassReport) -> list[tuple[Reshard, Collective]]:
    """The reshards for which a compiled module gathers the whole array on each device, with those gathers."""
    collectives = hlo.collectives(hlo.parse(text), every_branch=True)
    gathers = [one for one in collectives if one.kind == "all_gather"]
    return [(reshard, gather) for reshard in report.left for gather in gathers if _rebuilds(gather, reshard)]


def _rebuilds(gather: Collective, reshard: Reshard) -> bool:
    """Whether a gather results in all of the array that a reshard only moves from tiles to tiles."""
    source, target = reshard.source, reshard.target
    if source is None or target is None:
        return False
    whole = math.prod(source.shape)
    if max(math.prod(source.tile_shape), math.prod(target.tile_shape)) >= whole:
        return False
    dtype = dtypes.short(source.dtype)
    gathers_all = any(array.elements >= whole and array.dtype == dtype for array in gather.results)
    return gathers_all and _may_share_line(gather, reshard)


def _may_share_line(gather: Collective, reshard: Reshard) -> bool:
    """Whether both may come from one line of user code; True if either line is unknown."""
    if not reshard.where or gather.source.file is None or not gather.source.exact:
        return True
    return reshard.where == f"{gather.source.file}:{gather.source.line}"


def _rebuild_message(reshard: Reshard, gather: Collective) -> str:
    shape = () if reshard.source is None else reshard.source.shape
    place = reshard.where or reshard.operation or "an unknown line"
    return (
        f"{place}: the whole array of global shape {shape} is rebuilt on every device by {gather.name} "
        f"({gather.received_bytes} B received), to move it from {reshard.source} to "
        f"{reshard.target}; it was left to XLA: {reshard.why}"
    )
