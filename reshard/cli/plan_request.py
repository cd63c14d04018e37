"""From the text of a call to layouts and the plan between them.

    reshard plan --mesh x=4,y=2 'f32[{x}4, 16]' "P(None, 'x')"

The target has neither shape nor dtype and takes those of the source. In the same way, a sharding that brings a mesh
(HLO's, or Shardy's with its mesh written out) lends it to a layout that has none.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.cli.options import ArrayOptions, MoveOptions, PairOptions
from reshard.errors import NotationError, ReshardError
from reshard.synth import plan
from reshard.synth.planner import SLACK
from reshard.types import Layout, Mesh
from reshard.types.move import Move
from reshard.types.notation.detect import read
from reshard.types.notation.einops import read_part
from reshard.types.plan import Plan
from reshard.types.units import counted, parse_shape
from reshard.types.whole import written

_log = logging.getLogger("reshard")

_OURS = re.compile(r"\s*[A-Za-z_]\w*\s*\[")
_GIVE = re.compile(r"; (?:give|pass) (the mesh|shape and dtype|shape|dtype)(?: that has them)?$")
_NOT_ATOMS = frozenset(("self", "source", "target", "view", "take", "into", "cast"))
"""The arguments of `Move`, whose names no size can have."""
_OPTIONS = {"mesh": "--mesh x=4,y=2", "shape": "--shape 16,16", "dtype": "--dtype f32"}


class PlanRequest(NamedTuple):
    """The two layouts of a call, and the plan between them, which may spell the same layouts on another mesh."""

    source: Layout
    target: Layout
    plan: Plan


def planned(options: PairOptions) -> PlanRequest:
    """The layouts of a call, and the plan between them."""
    start = time.perf_counter()
    source, target = two_layouts(options)
    request = _planned(source, target, options)
    plan = request.plan
    steps = counted(len(plan.steps), "step")
    _log.info("planned %s -> %s in %.3f s, %s", source, target, time.perf_counter() - start, steps)
    return request


def _planned(source: Layout, target: Layout, options: PairOptions) -> PlanRequest:
    slack = SLACK if options.slack is None else share(options.slack)
    move = _move(source, target, options) if isinstance(options, MoveOptions) else None
    if move is None:
        return PlanRequest(source, target, plan(source, target, options.budget, options.network, options.donate, slack))
    return PlanRequest(source, target, plan(move, None, options.budget, options.network, options.donate, slack))


def _move(source: Layout, target: Layout, options: MoveOptions) -> Move | None:
    """The move of a call that has a view, a part or a cast; None for two layouts of one array."""
    if options.view is None and not (options.size or options.take or options.into or options.cast):
        return None
    sizes = {name: size if (size := written(text)) is not None else -1 for name, text in _pairs("size", options.size)}
    if taken := sorted(_NOT_ATOMS.intersection(sizes)):
        raise NotationError(f"--size {taken[0]}: no atom can have this name; call it otherwise in --view")
    take, into = (
        {_key(name, options.view): read_part(text) for name, text in _pairs(what, given)}
        for what, given in (("take", options.take), ("into", options.into))
    )
    return Move(source, target, options.view, take=take, into=into, cast=options.cast, **sizes)


def _pairs(what: str, given: list[str] | None) -> list[tuple[str, str]]:
    """NAME=VALUE texts as pairs."""
    pairs: list[tuple[str, str]] = []
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (equals and name and value) or (what == "size" and not value.isdecimal()):
            raise NotationError(
                f"--{what} {text!r}: write NAME={'N' if what == 'size' else 'INDEX or NAME=START:STOP'}"
            )
        pairs.append((name, value))
    return pairs


def _key(name: str, view: str | None) -> str | int:
    """An atom by name; without a view, a dim by number."""
    return int(name) if view is None and re.fullmatch("[0-9]{1,4}", name) else name


def one_layout(text: str, options: ArrayOptions) -> Layout:
    """The layout of a call that has only one."""
    return LayoutText.of(text, _mesh(options.mesh), options).read()


def two_layouts(options: PairOptions) -> tuple[Layout, Layout]:
    """Source and target; the shape, dtype or mesh that only one of them has serves for the other."""
    mesh = _mesh(options.mesh)
    target_mesh = mesh if options.target_mesh is None else _mesh(options.target_mesh)
    source = LayoutText.of(options.source, mesh, options)
    target = LayoutText.of(options.target, target_mesh, options)
    if source.ours:
        layout = source.read()
        # A target in our notation keeps its own shape, so that the planner can say what differs.
        return layout, target.read() if target.ours else target.of_the_array_of(layout).read_beside(layout)
    if target.ours:
        layout = target.read()
        return source.of_the_array_of(layout).read_beside(layout), layout
    return _two_shardings(source, target)


@dataclass(frozen=True)
class LayoutText:
    """The text of a layout, with the mesh, shape and dtype that the call gives for it."""

    text: str
    mesh: Mesh | None
    shape: tuple[int, ...] | None
    dtype: str | None

    @classmethod
    def of(cls, text: str, mesh: Mesh | None, options: ArrayOptions) -> LayoutText:
        """A text with the shape and dtype of a call."""
        return cls(text, mesh, None if options.shape is None else parse_shape(options.shape), options.dtype)

    @property
    def ours(self) -> bool:
        """Whether it is in our own notation, the only one with shape and dtype."""
        return _OURS.match(self.text) is not None

    def of_the_array_of(self, layout: Layout) -> LayoutText:
        """The same text for another layout's shape and dtype."""
        return replace(self, shape=layout.shape, dtype=layout.dtype)

    def read(self) -> Layout:
        """Reads the layout; an error names the options that would give what is missing."""
        try:
            return read(self.text, self.mesh, self.shape, self.dtype)
        except ReshardError as error:
            missing = _GIVE.search(str(error))
            if missing is None:
                raise
            options = " ".join(option for word, option in _OPTIONS.items() if word in missing[1])
            raise type(error)(f"{error}: {options}") from None

    def read_beside(self, other: Layout) -> Layout:
        """Reads the layout on the mesh that it is given or brings, else on the other layout's mesh."""
        if self.mesh is not None:
            return self.read()
        on_other = replace(self, mesh=other.mesh)
        try:
            layout = self.read()
        except ReshardError:
            return on_other.read()
        # HLO's `{replicated}` reads as one device: the number of devices is not in its text.
        return on_other.read() if layout.mesh.size == 1 < other.mesh.size else layout


def _two_shardings(source: LayoutText, target: LayoutText) -> tuple[Layout, Layout]:
    """Two layouts that are not in our notation; a mesh that one of them brings serves for the other."""
    try:
        layout = source.read()
    except ReshardError as error:
        if source.mesh is not None:
            raise
        try:  # The source may lack only a mesh, and the target may bring one.
            layout = target.read()
        except ReshardError:
            raise error from None
        return replace(source, mesh=layout.mesh).read(), layout
    second = target.read_beside(layout)
    return source.read_beside(second), second


def _mesh(text: str | None) -> Mesh | None:
    return None if text is None else Mesh.parse(text)


def share(text: str) -> float:
    """The number that `--slack` gives."""
    try:
        return float(text)
    except ValueError:
        raise ReshardError(f"cannot read the slack {text!r}; write a number of at least 0, e.g. 0.05") from None
