"""Strict mode: refuses a compiled program that still rebuilds a whole array, or needs too much memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

from reshard.doctor import Place, examine
from reshard.doctor.places import format_array
from reshard.errors import StrictError
from reshard.hlo import Source
from reshard.jax.pass_report import PassReport, Reshard
from reshard.synth.options import read_budget
from reshard.types.layout import Layout


class Limits(NamedTuple):
    """What a compiled program may do: rebuild arrays or not, and use `max_bytes` of temporary memory per device."""

    rebuild: bool = True
    max_bytes: int | None = None


_NONE = Limits()
_limits: ContextVar[Limits] = ContextVar("reshard_limits", default=Limits())  # noqa: B039 (it is immutable)


@contextmanager
def strict(*, max_bytes: int | str | None = None) -> Generator[None]:
    """A context in which `reshard.jax.jit` raises `StrictError` for a program that still rebuilds an array.

    A program rebuilds an array if every device comes to have all of it, and uses a part. That is what the doctor calls
    rebuilt; an array that is used as a whole is not, however it is gathered. With `max_bytes`, programs that need more
    temporary memory than that on a device (bytes, or text such as "64MiB") are refused, too. In nested contexts the
    tighter limits hold. Raises `PlanError` for a `max_bytes` that is not a number of bytes.

    >>> from reshard.jax import jit
    >>> with strict(max_bytes=1 << 20):
    ...     print(jit(lambda x: x + 1)(2.0))
    3.0
    """
    token = _limits.set(effective_limits(Limits(False, read_budget(max_bytes, "max_bytes"))))
    try:
        yield
    finally:
        _limits.reset(token)


def effective_limits(own: Limits) -> Limits:
    """The tighter of a function's own limits and those of the current context."""
    context = _limits.get()
    bounds = [bound for bound in (own.max_bytes, context.max_bytes) if bound is not None]
    return Limits(own.rebuild and context.rebuild, min(bounds, default=None))


def has_limits() -> bool:
    """Whether the current context has any limits."""
    return _limits.get() != _NONE


def check_limits(text: str, report: PassReport, limits: Limits, temp_bytes: int = 0) -> None:
    """Raises `StrictError`, naming the user's line, if a compiled module exceeds the limits.

    `text` is the module's HLO, `temp_bytes` its temporary memory on a device. What is rebuilt is what the doctor says;
    the report gives the names of axes and lines.
    """
    for place in () if limits.rebuild else examine(text, known=report.known).rebuilt:
        raise StrictError(_rebuild_message(place, report))
    if limits.max_bytes is not None and temp_bytes > limits.max_bytes:
        raise StrictError(
            f"the program needs {temp_bytes} B of temporary memory on a device, and max_bytes allows "
            f"{limits.max_bytes} B; its reshards:\n{report}"
        )


def _rebuild_message(place: Place, report: PassReport) -> str:
    where, move = _text_of_line(place.where) or str(place.where), place.rebuilt_move
    source, target = (None, None) if move is None else (move.source, move.target)
    names = ", ".join(collective.name for collective in place.collectives)
    array = "" if place.rebuilt is None else f" {format_array(place.rebuilt)}"
    what = f"the whole array{array}" if source is None else f"the whole array of global shape {source.shape}"
    # The pass may have left several reshards of this line to XLA: the reason is that of one between these layouts.
    line = _text_of_line(place.where)
    same = (one for one in report.left if one.where == line and (one.does or _are_alike(one, source, target)))
    why = next((one.why for one in same), "")
    return (
        f"{where}: {what} is rebuilt on every device by {names} ({place.received_bytes} B received), "
        + ("of which each uses a part" if source is None else f"to move it from {source} to {target}")
        + (f"; it was left to XLA: {why}" if why else "")
    )


def _text_of_line(source: Source) -> str:
    """The user's own line, `file:line`; empty if only one near it is known."""
    return f"{source.file}:{source.line}" if source.exact and source.file else ""


def _are_alike(reshard: Reshard, source: Layout | None, target: Layout | None) -> bool:
    """Whether a reshard has these layouts, in any dtype: XLA may convert before it sends."""
    if reshard.source is None or reshard.target is None or source is None or target is None:
        return False
    dtype = source.dtype
    return (source, target) == (replace(reshard.source, dtype=dtype), replace(reshard.target, dtype=dtype))
