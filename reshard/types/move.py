"""Moves: from one layout to another, with a view between their index spaces and a cast.

    Move(src, dst)                                                          the same array
    Move(src, dst, view="l (three h d) m -> three l h d m", three=3, h=32)  its dims split, merged, permuted
    Move(src, dst, view="(three h d) m -> h d m", take={"three": 0})        only part of the source
    Move(src, dst, view="h d m -> (three h d) m", into={"three": 0})        fills only part of the target
    Move(src, dst, cast=True)                                               another dtype
    Move(src, dst, changed=[(slice(0, 4), 7), 12])                          only what changed since the last move

A move says what is wanted. A plan says how, and is checked against it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, cast

from reshard.errors import NotationError, PlanError, did_you_mean, name_arguments, quoted
from reshard.types.index_set import Holding, IndexSet
from reshard.types.json_fields import Fields
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.notation import einops
from reshard.types.view import View
from reshard.types.whole import MOST_LISTED, checked_flag


@dataclass(frozen=True, init=False)
class Move:
    """What a plan does: `source`, `target`, the `view` between their indices, and whether values are cast.

    `view` is text in einops' notation, with the sizes that cannot be inferred as further arguments; without it the
    arrays have the same dims. `take` says which index or slice of a source's atom the target wants, `into` which part
    of a target's atom is filled; what the target's other parts hold stays. `have` is a layout in which devices of the
    target hold its array already, and `changed` the elements of the source that are stale there (`IndexSet.read`); with
    `changed` alone, they hold the target. Only what they lack, and what is stale, moves. Atoms are named by the view,
    or by the number of their dim. Raises `PlanError` or `NotationError` for arrays that do not fit.

    >>> mesh = Mesh(x=2)
    >>> source, target = Layout.parse("f32[6, {x}2]", mesh), Layout.parse("f32[{x}2, 3, 2]", mesh)
    >>> print(Move(source, target, view="(a b) c -> c b a", a=2))
    f32[6, {x}2] -> f32[{x}2, 3, 2] on <x=2>, view (a b) c -> c b a
    """

    source: Layout
    target: Layout
    view: View
    cast: bool = False
    holding: Holding | None = None

    @name_arguments
    def __init__(
        self,
        source: Layout,
        target: Layout,
        view: str | View | None = None,
        *,
        take: Mapping[Any, Any] | None = None,
        into: Mapping[Any, Any] | None = None,
        cast: bool = False,
        have: Layout | None = None,
        changed: object = None,
        **sizes: int,
    ) -> None:
        put = object.__setattr__
        put(self, "source", _checked_layout("source", source))
        put(self, "target", _checked_layout("target", target))
        put(self, "cast", checked_flag(cast, "cast"))
        if isinstance(view, View):
            if take or into or sizes:
                raise PlanError(
                    f"the view {view} has its sizes and parts already; give take, into and sizes only with a view as "
                    f"text"
                )
            put(self, "view", view)
        else:
            put(self, "view", _resolve_view(source, target, view, (take, into), sizes))
        held = have is not None or changed is not None
        if held:
            layout = target if have is None else _checked_layout("have=", have)
            put(self, "holding", Holding(layout, IndexSet.read(changed, source.shape)))
        else:
            put(self, "holding", None)
        self._check()

    def _check(self) -> None:
        source, target, view = self.source, self.target, self.view
        for what, layout, shape in (("source", source, view.source_shape), ("target", target, view.target_shape)):
            if layout.shape != shape:
                raise PlanError(
                    f"the view {view} has a {what} of global shape {shape}, but {layout} has {layout.shape}; give the "
                    f"view and the {what} the same shape"
                )
        if source.dtype != target.dtype and not self.cast:
            raise PlanError(
                f"source {source} is {source.dtype}, target {target} is {target.dtype}; a move keeps the dtype unless "
                f"cast=True"
            )
        if source.dtype.startswith("complex") and not target.dtype.startswith("complex"):
            raise PlanError(
                f"source {source} is cast to {target.dtype}, which has no imaginary parts; take them before"
            )
        if view.into and (source.partial or target.partial):
            raise PlanError(
                f"source {source}, target {target}: `into` fills part of an array, which no summand of a sum has; "
                f"finish the sum first"
            )
        if self.holding is not None:
            self._check_holding(self.holding.layout)
        if self.casts and target.partial:
            raise PlanError(
                f"source {source} is cast to the partial target {target}: the sum of rounded values is not the "
                f"rounded sum; cast to a target that is not partial"
            )

    def _check_holding(self, have: Layout) -> None:
        target = self.target
        if self.source.partial or target.partial or have.partial:
            raise PlanError(
                f"source {self.source}, target {target}, have={have}: what devices hold of a sum are summands, and "
                f"these change with every element; finish the sum first, or leave out have= and changed="
            )
        if (have.shape, have.dtype) != (target.shape, target.dtype):
            raise PlanError(
                f"have={have} is not of the target's array, {target.dtype} of global shape {target.shape}; give the "
                f"layout in which its devices hold that array already"
            )
        if self.view.into and have != target:
            raise PlanError(
                f"have={have}: a move into part of {target} leaves its other parts as they are, so that devices hold "
                f"the target itself; leave out have=, or give the target's layout"
            )

    @property
    def casts(self) -> bool:
        """Whether the dtypes differ."""
        return self.source.dtype != self.target.dtype

    @property
    def fills(self) -> bool:
        """Whether the target is there already, and what the move does not write of it stays."""
        return self.view.into or self.holding is not None

    @cached_property
    def plain(self) -> bool:
        """Whether the array, its dims and its dtype stay as they are, and all that devices need moves."""
        return not self.casts and self.view.plain and self.holding is None

    @property
    def have(self) -> Layout | None:
        """The layout in which devices of the target hold its array already, None if nothing is known to be held."""
        return None if self.holding is None else self.holding.layout

    @property
    def changed(self) -> IndexSet | None:
        """The elements of the source that are stale in what devices hold; None if nothing is known to be held."""
        return None if self.holding is None else self.holding.stale

    def to_json(self) -> str:
        """The move as a JSON object; `from_json` reads it back.

        >>> layout = Layout.parse("f32[{x}4]", Mesh(x=2))
        >>> Move.from_json(Move(layout, layout).to_json()) == Move(layout, layout)
        True
        """
        data = {
            "source": str(self.source),
            "target": str(self.target),
            "mesh": self.source.mesh.to_dict(),
            "target_mesh": self.target.mesh.to_dict(),
            "view": self.view.to_dict(),
            "cast": self.cast,
        }
        return json.dumps({**data, **(self.holding.to_dict() if self.holding else {})})

    @classmethod
    def from_json(cls, text: str) -> Move:
        """Reads the text of `to_json` and checks the move again; raises `PlanError` for other text."""
        fields = Fields.read(text, "a move")
        source = Layout.parse(fields.get("source", str), Mesh.from_dict(fields.object("mesh")))
        target = Layout.parse(fields.get("target", str), Mesh.from_dict(fields.object("target_mesh")))
        have, changed = Holding.read_fields(fields) or (None, None)
        view = View.from_dict(fields.object("view"))
        return cls(source, target, view, cast=fields.get("cast", bool), have=have, changed=changed)

    def __str__(self) -> str:
        view = "" if self.view.plain else f", view {self.view}"
        held = "" if self.holding is None else f", have {self.holding.layout}, changed {self.holding.stale}"
        return f"{self.source} -> {self.target} on {self.source.mesh}{view}{', cast' * self.casts}{held}"


def refuse_sizes(sizes: Mapping[str, object], options: Iterable[str]) -> NoReturn:
    """Raises `PlanError` for sizes of atoms without a view: most often, the name of an option is misspelled."""
    wrong = min(sizes)
    raise PlanError(
        f"unknown argument {quoted(wrong)}; sizes of atoms need a view, such as view='(a b) -> b a'"
        f"{did_you_mean(wrong, options)}"
    )


def _checked_layout(what: str, layout: object) -> Layout:
    if isinstance(layout, Layout):
        return layout
    raise PlanError(
        f"the {what} {quoted(layout)} of a move is a {type(layout).__name__}, not a Layout; read it with "
        f"reshard.as_layout"
    )


def _resolve_view(
    source: Layout, target: Layout, view: object, parts: tuple[object, object], sizes: Mapping[str, object]
) -> View:
    given: list[Mapping[Any, Any]] = []
    for what, part in zip(("take", "into"), parts, strict=True):
        if part is not None and not isinstance(part, Mapping):
            raise PlanError(f'{what} {quoted(part)}: give a dict of atom to index or slice, such as {{"three": 0}}')
        given.append({} if part is None else cast("Mapping[Any, Any]", part))
        if len(given[-1]) > MOST_LISTED:
            raise PlanError(f"{what} names {len(given[-1])} atoms; at most {MOST_LISTED} are there to name")
    take, into = given
    if view is not None:
        if not isinstance(view, str):
            raise PlanError(f'view {quoted(view)}: give text such as "(a b) -> b a", or a View')
        pattern = einops.parse_pattern(view)
        for named in given:
            wrong = next((name for name in named if not isinstance(name, str)), None)
            if wrong is not None:
                raise NotationError(f"part of {quoted(wrong)}: with a view, name the atom as the view does")
        return einops.resolve_pattern(pattern, (source.shape, target.shape), sizes, take, into)
    # Without a view, arrays have the same dims; parts to take or fill are named by the numbers of the dims.
    if sizes:
        refuse_sizes(sizes, ("view", "take", "into", "cast", "have", "changed"))
    if not take and not into:
        if source.shape != target.shape:
            raise PlanError(
                f"source {source} has global shape {source.shape}, target {target} has {target.shape}; give a view, "
                f'such as view="(a b) -> a b", or both the same global shape'
            )
        return View.identity(source.shape)
    rank = max(len(source.shape), len(target.shape))
    wrong = next((name for name in (*take, *into) if not (isinstance(name, int) and 0 <= name < rank)), None)
    if wrong is not None:
        raise NotationError(
            f"part of {quoted(wrong)}: without a view, parts are of dims by number, from 0 to {rank - 1}; name atoms "
            f'with a view, such as view="(three h) -> three h"'
        )
    names = tuple((f"d{at}",) for at in range(rank))
    text = " ".join(f"d{at}" for at in range(rank))
    pattern = einops.Pattern(f"{text} -> {text}", names, names)
    renamed = [{f"d{name}": part for name, part in named.items()} for named in given]
    return einops.resolve_pattern(pattern, (source.shape, target.shape), {}, *renamed)
