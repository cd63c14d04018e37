"""Strict mode: a compiled program that still rebuilds an array, or needs too much memory, is refused."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from reshard import hlo
from reshard.errors import StrictError
from reshard.hlo import Collective
from reshard.jax.pass_report import Report, Reshard
from reshard.types import dtypes


class Limits(NamedTuple):
    """What a compiled program may do: whether it may rebuild arrays, and its temporary memory in bytes a device."""

    rebuild: bool = True
    max_bytes: int | None = None


_limits: ContextVar[Limits] = ContextVar("reshard_limits", default=Limits())  # noqa: B039 (it is immutable)


@contextmanager
def strict(*, max_bytes: int | None = None) -> Generator[None]:
    """In this context `reshard.jax.jit` raises `StrictError` for programs that still rebuild an array.

    That is: whose compiled module gathers, on every device, all of an array that only had to move from tiles to
    tiles; or, with `max_bytes`, whose temporary memory on a device is more. Inside of one another the tighter holds.
    """
    token = _limits.set(limits(Limits(False, max_bytes)))
    try:
        yield
    finally:
        _limits.reset(token)


def limits(given: Limits) -> Limits:
    """The tighter of what was given and what the context says."""
    around = _limits.get()
    bounds = [bound for bound in (given.max_bytes, around.max_bytes) if bound is not None]
    return Limits(given.rebuild and around.rebuild, min(bounds, default=None))


def check(text: str, report: Report, limits: Limits, temp_bytes: int = 0) -> None:
    """Raises `StrictError` for the text of a compiled module that breaks the limits, naming the user's line.

    A module rebuilds an array where a reshard of the report, between layouts that both split it, gathers all of it
    on each device. `temp_bytes` are those of its temporary memory on a device.
    """
    for reshard, gather in [] if limits.rebuild else rebuilt(text, report):
        raise StrictError(_rebuilds_message(reshard, gather))
    if limits.max_bytes is not None and temp_bytes > limits.max_bytes:
        raise StrictError(
            f"the program needs {temp_bytes} B of temporary memory on a device, and max_bytes allows "
            f"{limits.max_bytes} B; its reshards:\n{report}"
        )


def rebuilt(text: str, report: Report) -> list[tuple[Reshard, Collective]]:
    """The reshards for which a compiled module gathers the whole array on each device, with the gathers."""
    gathers = [found for found in hlo.collectives(hlo.parse(text), every_branch=True) if found.kind == "all_gather"]
    return [(reshard, gather) for reshard in report.left for gather in gathers if _rebuilds(gather, reshard)]


def _rebuilds(gather: Collective, reshard: Reshard) -> bool:
    """Whether a gather's result is all of the array that a reshard only moves from tiles to tiles."""
    source, target = reshard.source, reshard.target
    if source is None or target is None:
        return False
    whole = math.prod(source.shape)
    if max(math.prod(source.tile_shape), math.prod(target.tile_shape)) >= whole:
        return False
    return any(a.elements >= whole and a.dtype == dtypes.short(source.dtype) for a in gather.results) and _near(
        gather, reshard
    )


def _near(gather: Collective, reshard: Reshard) -> bool:
    """Whether both come from the same line, as far as their origins say."""
    if not reshard.where or gather.source.file is None or not gather.source.exact:
        return True
    return reshard.where == f"{gather.source.file}:{gather.source.line}"


def _rebuilds_message(reshard: Reshard, gather: Collective) -> str:
    shape = () if reshard.source is None else reshard.source.shape
    place = reshard.where or reshard.operation or "an unknown line"
    return (
        f"{place}: the whole array of global shape {shape} is rebuilt on every device by {gather.name} "
        f"({gather.received_bytes} B received), to move it from {reshard.source} to "
        f"{reshard.target}; it was left to XLA: {reshard.why}"
    )
