"""Tables: rules for the names of a whole model, resolved on its arrays.

    extends = "llama-to-vllm"        rules of another table, for arrays that no rule of this one names
    [sizes]
    tp = 1                           sizes that the caller may leave out: numbers, or expressions
    [[rule]]
    source = ...

Each array of the source is looked up by its name, and has the view of the rule that names it. What the rules make of a
model is checked as a whole: all arrays have a rule, parts of a source do not overlap unless a rule says `also`, and
each target is filled exactly once.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, cast

from reshard.errors import NamedErrors, NotationError, PlanError, did_you_mean, quoted, shortened
from reshard.geometry.cover import find_overlap, find_uncovered, list_combs
from reshard.geometry.view_layouts import invert_view
from reshard.names.expressions import Expression, Sizes
from reshard.names.patterns import split_numbers
from reshard.names.rules import Case, NamedView, read_cases, read_fields
from reshard.types.input_files import read_input
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.view import View
from reshard.types.whole import MOST, check_kind, read_items, whole, written

_MOST_BYTES = 1 << 20
_MOST_EXTENDED = 8
_FIELDS = ("extends", "sizes", "rule")

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Table:
    """Rules that map the names of one framework to another's; `read` makes one.

    `levels` are its own rules, then those of the table that it extends, and so on: an array has those of the first
    level that names it.

    >>> table = read('''
    ... [[rule]]
    ... source = "{l}.w{1,3}"
    ... target = "{l}.w13"
    ... view = "i m -> (two i) m"
    ... sizes = {two = {1 = 1, 3 = 1}}
    ... ''')
    """

    name: str
    levels: tuple[tuple[Case, ...], ...]
    defaults: Mapping[str, Expression] = field(default_factory=dict[str, Expression])
    inverted: Table | None = None

    def inverse(self) -> Table:
        """The table back, from the target's names and shapes to the source's.

        Of several copies of a source one goes back, and nothing of what a rule with `also` fills.
        """
        if self.inverted is not None:
            return self.inverted
        levels = tuple(tuple(back for case in cases if (back := case.inverse()) is not None) for cases in self.levels)
        return Table(f"{self.name}, inverted", levels, self.defaults, self)

    def resolve(self, shapes: Mapping[str, Sequence[int]], /, **sizes: int) -> tuple[NamedView, ...]:
        """What each array of the source fills, in the order of `shapes`, which has their global shapes.

        `sizes` are those that the table's expressions use. Raises `PlanError` where the table does not fit the model.

        >>> table = read('[[rule]]\\nsource = "{l}.w"\\ntarget = "w[{l}]"')
        >>> [(each.target, each.view.target_shape) for each in table.resolve({"0.w": (4,), "1.w": (4,)})]
        [('w', (2, 4)), ('w', (2, 4))]
        """
        check_kind(shapes, Mapping, "shapes", 'a dict of names and global shapes, such as {"w": (4, 2)}')
        model = Sizes(self.defaults, sizes)
        unknown = next((name for name in sizes if name not in self._size_names), None)
        if unknown is not None:
            raise PlanError(
                f"{self.name} has no size {quoted(unknown)}{did_you_mean(unknown, self._size_names)}; its sizes are "
                f"{', '.join(sorted(self._size_names))}"
            )
        # For each level, the cases that a model of these sizes has, by the key of their source.
        found: list[dict[str, list[Case]]] = []
        for cases in self.levels:
            found.append({})
            for case in cases:
                if case.varies or model.value(case.when):
                    found[-1].setdefault(case.source.key, []).append(case)
        matches = [match for name, shape in shapes.items() for match in self._match_name(name, shape, model, found)]
        counts: dict[tuple[str, str], int] = {}
        for match in matches:
            for name in match.case.counted:
                place = match.target, name
                counts[place] = max(counts.get(place, 0), match.values[name] + 1)
        # Layers differ in their names only, so that few views serve them all.
        views: dict[object, View] = {}
        made: list[NamedView] = []
        for match in matches:
            case, values = match.case, match.values
            counted = {name: counts[match.target, name] for name in case.counted}
            key = (case, match.shape, *values.values(), *counted.values())
            if key not in views:
                with NamedErrors(f"{case.where}: {quoted(match.source)}"):
                    views[key] = case.make_view(match.shape, model, values, counted)
            made.append(NamedView(match.source, match.target, views[key]))
        self._check_single_use(matches, made)
        return tuple(made)

    def target_shapes(self, shapes: Mapping[str, Sequence[int]], /, **sizes: int) -> dict[str, Shape]:
        """The global shapes of the arrays that the source's fill, by name.

        >>> read('[[rule]]\\nsource = "{l}.w"\\ntarget = "w[{l}]"').target_shapes({"0.w": (4,), "1.w": (4,)})
        {'w': (2, 4)}
        """
        return {each.target: each.view.target_shape for each in self.resolve(shapes, **sizes)}

    def moves(
        self, sources: Mapping[str, Layout], targets: Mapping[str, Layout], /, **sizes: int
    ) -> tuple[dict[str, Move], dict[str, str], dict[str, str]]:
        """Moves between these layouts, and by their names the array that each reads and the one that it fills.

        They are what `rs.plan_tree(moves, sources=, targets=)` takes. A move has the name of its source, or of
        both where a source has several. Where dtypes differ, moves cast.
        """
        for given in (sources, targets):
            check_kind(given, Mapping, "layouts", "a dict of names and layouts")
            for name, layout in given.items():
                check_kind(layout, Layout, f"the layout of {quoted(name)},", "one, read with Layout.parse")
        named = self.resolve({name: layout.shape for name, layout in sources.items()}, **sizes)
        made = {each.target for each in named}
        for given, wanted, cure in ((targets, made, "give its layout"), (made, targets, "leave its layout out")):
            missing = next((name for name in wanted if name not in given), None)
            if missing is not None:
                what = "is filled, but no target" if given is targets else "is a target, but no array fills it"
                raise PlanError(f"{self.name}: {quoted(missing)} {what}; {cure}")
        return list_moves(named, sources, targets)

    def list_unnamed(self, names: Iterable[str]) -> list[str]:
        """Those of some names that no rule names; what sizes a rule asks for is not looked at.

        >>> read('[[rule]]\\nsource = "{l}.w"\\ntarget = "w[{l}]"').list_unnamed(["0.w", "w.0", "0.b"])
        ['w.0', '0.b']
        """
        known: dict[str, list[Case]] = {}
        for case in (case for cases in self.levels for case in cases):
            known.setdefault(case.source.key, []).append(case)
        unnamed: list[str] = []
        for name in names:
            key, numbers = split_numbers(name)
            if all(case.source.bind(numbers) is None for case in known.get(key, ())):
                unnamed.append(name)
        return unnamed

    @cached_property
    def _size_names(self) -> set[str]:
        used = {
            name for cases in self.levels for case in cases for name in case.names - case.wildcards - set(case.each)
        }
        return used | self.defaults.keys() | {name for size in self.defaults.values() for name in size.names}

    def _match_name(
        self, name: object, shape: object, model: Sizes, cases: Sequence[Mapping[str, Sequence[Case]]]
    ) -> Iterator[_Match]:
        sizes: Shape | None = read_items(shape)
        if not isinstance(name, str) or sizes is None or any(whole(size) is None for size in sizes):
            raise PlanError(
                f'{quoted(name)} of shape {quoted(shape)}: give names and global shapes, such as "w": (4, 2)'
            )
        key, numbers = split_numbers(name)
        for level in cases:
            found = False
            for case in level.get(key, ()):
                values = case.source.bind(numbers)
                if values is None:
                    continue
                indices: dict[str, int] = {}
                for each in case.indices:
                    if each not in case.each:
                        if (index := written(values[each])) is None:
                            raise PlanError(f"index {quoted(values[each])} is more than {MOST}, the largest")
                        indices[each] = index
                every: Sequence[dict[str, int]] = [{}]
                if case.each:
                    with NamedErrors(f"{case.where}: {quoted(name)}"):
                        every = list(case.list_each(sizes, model))
                for own in every:
                    own.update(indices)
                    if case.varies and not model.value(case.when, own):
                        continue
                    found = True
                    if case.target is not None:
                        target = case.target.fill({**own, **values} if case.each else values)
                        yield _Match(case, name, target, sizes, own)
            if found:
                return
        known = [key for level in cases for key in level]
        raise PlanError(
            f"{self.name}: no rule names {quoted(name)}{did_you_mean(key, known)}; add one, without a target if the "
            f"array goes nowhere"
        )

    def _check_single_use(self, matches: Sequence[_Match], made: Sequence[NamedView]) -> None:
        """Raises `PlanError` for parts of a source that overlap, and for targets that are not filled exactly once."""
        groups: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
        for at, match in enumerate(matches):
            groups[1].setdefault(match.target, []).append(at)
            if not match.case.also:
                groups[0].setdefault(match.source, []).append(at)
        checked: set[object] = set()
        for side, group in enumerate(groups):
            for name, numbers in group.items():
                views = [made[at].view for at in numbers]
                if len(views) == 1 and not (side and views[0].into):
                    continue
                key = (side, *map(id, views))
                if key not in checked:
                    with NamedErrors(self.name):
                        self._check_cover(name, [matches[at] for at in numbers], views, filled=bool(side))
                    checked.add(key)

    def _check_cover(self, name: str, matches: Sequence[_Match], views: Sequence[View], filled: bool) -> None:
        shape = views[0].target_shape if filled else views[0].source_shape
        for match, view in zip(matches, views, strict=True):
            if filled and view.target_shape != shape:
                raise PlanError(
                    f"{quoted(name)} has shape {shape} by {matches[0].about}, and {view.target_shape} by "
                    f"{match.about}; give arrays of one model, or the sizes that its table names, such as heads=8, "
                    f"kv_heads=4"
                )
        if not filled:
            views = [invert_view(view) for view in views]
        # Copies of a source are one part of it.
        parts = {
            (at if filled else match.case, list_combs(view)): (match, view)
            for at, (match, view) in enumerate(zip(matches, views, strict=True))
        }
        whose = [match for match, _ in parts.values()]
        views = [view for _, view in parts.values()]
        overlap = find_overlap(tuple(views))
        if overlap is not None:
            one, other, index = overlap
            cure = "let parts not overlap" if filled else "write also = true where that is meant"
            what = "filled" if filled else "moved"
            raise PlanError(
                f"element {index} of {quoted(name)} is {what} by {whose[one].about} and by {whose[other].about}; {cure}"
            )
        if not filled or any(match.case.partly for match in matches):
            return
        missing = find_uncovered(tuple(views))
        if missing is not None:
            raise PlanError(
                f"element {missing} of {quoted(name)}, of shape {shape}, is filled by none of its {len(views)} parts, "
                f"the first of which is {whose[0].about}; give the arrays that are missing, or write partly = true"
            )


def list_moves(
    named: Sequence[NamedView], sources: Mapping[str, Layout], targets: Mapping[str, Layout]
) -> tuple[dict[str, Move], dict[str, str], dict[str, str]]:
    """The moves of what a table resolved, and by their names the array that each reads and the one that it fills."""
    times = Counter(each.source for each in named)
    moves: dict[str, Move] = {}
    ends: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for each in named:
        name = base = each.source if times[each.source] == 1 else f"{each.source} -> {each.target}"
        number = 1
        while name in moves:
            number += 1
            name = f"{base} ({number})"
        source, target = sources[each.source], targets[each.target]
        moves[name] = Move(source, target, each.view, cast=source.dtype != target.dtype)
        ends[0][name], ends[1][name] = each.source, each.target
    return moves, *ends


class _Match(NamedTuple):
    """A case for an array: what it fills, and the values of the indices."""

    case: Case
    source: str
    target: str
    shape: Shape
    values: Mapping[str, int]

    @property
    def about(self) -> str:
        return f"{quoted(self.source)} ({self.case.where})"


def read(given: str | Path) -> Table:
    """A table that comes along, by its name, or one from a file, or from text in TOML.

    Raises `NotationError` for anything that is not a table, with the file and the rule.

    >>> read("llama-to-vllm").target_shapes({"model.norm.weight": (4096,)})
    {'model.norm.weight': (4096,)}
    """
    return _read_table(given, 0)


def _read_table(given: Any, depth: int) -> Table:
    if depth > _MOST_EXTENDED:
        raise NotationError(f"table {quoted(given)}: tables extend one another without end; take one `extends` out")
    folder = resources.files("reshard.names") / "tables"
    known = sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))
    name = str(given) if isinstance(given, str | Path) else ""
    text: object = None
    try:
        if name in known:
            text = (folder / f"{name}.toml").read_text(encoding="utf-8")
        elif isinstance(given, str) and ("\n" in given or "=" in given):
            name, text = "table", given
        elif name:
            text = read_input(name, _MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise NotationError(
            f"table {quoted(given)} cannot be read ({shortened(str(error))}){did_you_mean(name, known)}; give a file, "
            f"text in TOML, or one of {', '.join(known)}"
        ) from None
    if not isinstance(text, str) or len(text) > _MOST_BYTES:
        raise NotationError(f"table {quoted(given)}: give a file, text in TOML, or one of {', '.join(known)}")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotationError(f"{name} is not TOML ({shortened(str(error))}); mend it there") from None
    with NamedErrors(name):
        fields = read_fields(data, _FIELDS, "a table")
        sizes = read_fields(fields.get("sizes", {}), (), "sizes")
        defaults = {size: Expression.read(default) for size, default in sizes.items()}
        rules = fields.get("rule", [])
        if not isinstance(rules, list):
            raise NotationError(f"rule is {quoted(rules)}; head each rule with [[rule]]")
    own: list[Case] = []
    for number, rule in enumerate(cast("list[object]", rules), 1):
        with NamedErrors(f"{name}, rule {number}"):
            own += read_cases(rule, f"{name}, rule {number}")
    if "extends" not in fields:
        return Table(name, (tuple(own),), defaults)
    base = _read_table(fields["extends"], depth + 1)
    return Table(name, (tuple(own), *base.levels), {**base.defaults, **defaults})
