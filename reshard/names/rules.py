"""Rules of a table: two names, and the view between the arrays that have them.

    [[rule]]
    source = "layers.{l}.{gate,up}_proj.weight"
    target = "layers.{l}.gate_up_proj.weight"
    view = "(t two i) ... -> (t two i) ..."                      i is inferred from the array
    sizes = {t = "tp", two = {gate = 1, up = 1}}                 gate beside up: what each alternative fills

A rule is a *case* for each choice of its alternatives. An index is an expression too: that of `[{e}]` is "e", the
wildcard's number in the name at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

from reshard.errors import NotationError, did_you_mean, quoted
from reshard.names.expressions import Expression, Sizes
from reshard.names.patterns import NamePattern, NameTemplate, Options, Wildcard, parse_name
from reshard.types.notation import einops
from reshard.types.view import View, Window

Bounds = tuple[Expression, ...]
"""An index, or a start and an end."""

_FIELDS = ("source", "target", "view", "sizes", "take", "into", "copies", "also", "partly", "when")
_INDEX = ("taken", "index")
_MOST_CASES = 1 << 12
_MOST_EACH = 1 << 16
_ALWAYS = Expression.read(1)


@dataclass(frozen=True)
class NamedView:
    """An array of the source, one of the target, and the view between them; its windows say which parts it moves."""

    source: str
    target: str
    view: View


@dataclass(frozen=True, eq=False)
class Case:
    """A rule with its alternatives chosen.

    `where` is the table and the rule, for errors. `each` are names of atoms of which every index is filled or taken:
    copies of one source, or what a stacked array is taken apart into. Without a target, the array goes nowhere. `also`
    lets other rules move its sources, too, `partly` lets the target have elements that no rule fills.
    """

    source: NameTemplate
    target: NameTemplate | None
    view: einops.Pattern
    sizes: Mapping[str, Expression]
    take: Mapping[str, Bounds]
    into: Mapping[str, Bounds]
    each: tuple[str, ...] = ()
    also: bool = False
    partly: bool = False
    when: Expression = _ALWAYS
    where: str = ""

    def inverse(self) -> Case | None:
        """The case back; None where nothing goes back."""
        if self.target is None:
            return None
        if self.also:
            return replace(self, source=self.target, target=None)  # Another rule is the way back to its source.
        # One of several copies goes back; what wildcards numbered is taken apart.
        single = {name: (Expression.read(0),) for name in self.each}
        each = tuple(sorted(self.source.wildcards - self.target.wildcards))
        return replace(
            self,
            source=self.target,
            target=self.source,
            view=self.view._replace(source=self.view.target, target=self.view.source),
            take={**self.into, **single},
            into=self.take,
            each=each,
        )

    @cached_property
    def names(self) -> set[str]:
        """Those in its expressions: of sizes, of wildcards, and of `each`."""
        bounds = [bounds for given in (self.take, self.into) for bounds in given.values()]
        parts = (*self.sizes.values(), *itertools.chain(*bounds), self.when)
        return {name for each in parts for name in each.names}

    @cached_property
    def wildcards(self) -> set[str]:
        """Those of both names."""
        return self.source.wildcards | (self.target.wildcards if self.target else set())

    @cached_property
    def varies(self) -> bool:
        """Whether it depends on an array's numbers that the rule is there."""
        return not self.wildcards.isdisjoint(self.when.names)

    @cached_property
    def indices(self) -> tuple[str, ...]:
        """The wildcards whose values the view depends on."""
        return tuple(sorted(self.names & self.wildcards))

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The indices of the target that have no size: there are as many as arrays with them."""
        return tuple(name for name in self.indices if name in self.into and name not in self.sizes)

    def list_each(self, shape: tuple[int, ...], sizes: Sizes) -> Iterator[dict[str, int]]:
        """The values of `each`; where the rule does not say how many, as many as the array's first dim."""
        counts: list[int] = []
        for name in self.each:
            if name in self.sizes:
                counts.append(sizes.value(self.sizes[name]))
            elif self.view.source[:1] == ((name,),) and shape:
                counts.append(shape[0])
            else:
                raise NotationError(f"how many {name} there are is not known; write sizes = {{{name} = ...}}")
        if min(counts, default=0) < 0 or math.prod(counts) > _MOST_EACH:
            raise NotationError(f"its {' x '.join(self.each)} are {counts}; at most {_MOST_EACH} go each its own way")
        for values in itertools.product(*map(range, counts)):
            yield dict(zip(self.each, values, strict=True))

    def make_view(
        self, shape: tuple[int, ...], sizes: Sizes, values: Mapping[str, int], counted: Mapping[str, int]
    ) -> View:
        """The view for a source of this shape, where wildcards have these values, and `counted` indices these sizes."""
        given = {**counted, **{name: sizes.value(size, values) for name, size in self.sizes.items()}}
        parts: list[dict[str, Any]] = []
        for bounds in (self.take, self.into):
            ends = {name: tuple(sizes.value(each, values) for each in pair) for name, pair in bounds.items()}
            parts.append({name: pair[0] if len(pair) == 1 else pair for name, pair in ends.items()})
        view = einops.resolve_pattern(self.view, (shape, None), given, *parts)
        # A part that is all of its atom is no part.
        whole = [
            atom._replace(
                taken=None if atom.taken == Window(0, atom.size) else atom.taken,
                into=None if atom.into == Window(0, atom.size) else atom.into,
            )
            for atom in view.atoms
        ]
        return View(tuple(whole), view.source, view.target)


def read_fields(data: object, known: Sequence[str], what: str) -> dict[str, Any]:
    """A table of TOML that has these fields and no others; any, if `known` is empty."""
    if not isinstance(data, dict):
        raise NotationError(f"{what} is {quoted(data)}; give a table of TOML")
    fields = cast("dict[str, Any]", data)
    unknown = next((name for name in fields if known and name not in known), None)
    if unknown is not None:
        raise NotationError(
            f"{what} has a field {quoted(unknown)}{did_you_mean(unknown, known)}; the fields are {', '.join(known)}"
        )
    return fields


def read_cases(data: object, where: str) -> Iterator[Case]:
    """The cases of a rule of TOML, which stands at `where`; raises `NotationError` for anything else."""
    fields = read_fields(data, _FIELDS, "a rule")
    patterns = [parse_name(fields.get("source"))] + ([parse_name(fields["target"])] if "target" in fields else [])
    flags = {name: fields.get(name, False) for name in ("also", "partly")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise NotationError(f"{name} is {quoted(flag)}; give true or false")
    when = Expression.read(fields.get("when", 1))
    sizes = dict(read_fields(fields.get("sizes", {}), (), "sizes"))
    parts = [
        {name: _read_bounds(bounds) for name, bounds in read_fields(fields.get(which, {}), (), which).items()}
        for which in ("take", "into")
    ]
    view = einops.parse_pattern(fields.get("view", "... -> ..."))
    dims = [view.source, view.target]
    for side, bracket in enumerate(pattern.bracket for pattern in patterns):
        # Brackets are an index of a first dim that only this side has.
        if bracket is not None:
            name = bracket.name if isinstance(bracket, Wildcard) else _INDEX[side]
            dims[side] = ((name,), *dims[side])
            if isinstance(bracket, Options):
                sizes[name] = 1 + max(map(int, bracket.texts))
    shown = " -> ".join(" ".join(f"({' '.join(dim)})" for dim in each) for each in dims)
    view = einops.parse_pattern(shown.replace("(...)", "..."))
    atoms = [{name for dim in side for name in dim} for side in dims]
    for what, given, known in (
        ("sizes", sizes, atoms[0] | atoms[1]),
        ("take", parts[0], atoms[0]),
        ("into", parts[1], atoms[1]),
    ):
        wrong = next((name for name in given if name not in known), None)
        if wrong is not None:
            raise NotationError(
                f"{what} names {quoted(wrong)}, no atom there{did_you_mean(wrong, known)}; those of {shown} are "
                f"{', '.join(sorted(known))}"
            )
    # An atom that only one side has is indexed by the wildcard of its name.
    wildcards = [pattern.wildcards for pattern in patterns]
    for name in sorted((wildcards[0] | wildcards[-1]) & (atoms[0] ^ atoms[1])):
        parts[name in atoms[1]].setdefault(name, _read_bounds(name))
    lost = (wildcards[0] ^ wildcards[-1]) - (atoms[0] ^ atoms[1])
    if lost:
        raise NotationError(f"wildcard {{{min(lost)}}} is in one name only; write it in both, or as an index")
    copies = fields.get("copies")
    if copies is not None:
        if not isinstance(copies, str) or copies not in sizes or copies not in atoms[1] - atoms[0]:
            raise NotationError(f"copies is {quoted(copies)}; name an atom of the target alone that has a size")
        parts[1][copies] = _read_bounds(copies)
    for choice in _list_choices(patterns):
        own = [dict(part) for part in parts]
        names: list[NameTemplate] = []
        for side, (pattern, texts) in enumerate(zip(patterns, choice.texts, strict=True)):
            chosen = iter(texts)
            pieces = [next(chosen) if isinstance(piece, Options) else piece for piece in pattern.pieces]
            names.append(NameTemplate.build(pieces))
            if isinstance(pattern.bracket, Options):
                own[side][_INDEX[side]] = _read_bounds(next(chosen))
        yield Case(
            names[0],
            names[1] if len(names) == 2 else None,
            view,
            {name: _read_size(name, size, choice.alone, own) for name, size in sizes.items()},
            own[0],
            own[1],
            () if copies is None else (copies,),
            flags["also"],
            flags["partly"],
            when,
            where,
        )


class _Choice(NamedTuple):
    """For each side, the texts chosen, and those of them that the other side has nothing for."""

    texts: list[list[str]]
    alone: list[set[str]]


def _list_choices(patterns: Sequence[NamePattern]) -> Iterator[_Choice]:
    """The alternatives of both names: those with the same texts are one choice, then those left, in order."""
    options = [pattern.options for pattern in patterns]
    pairs: list[list[tuple[int, int]]] = []  # For each choice, the sides and places of its alternatives.
    left = [list(range(len(each))) for each in options]
    if len(options) == 2:
        for mine in list(left[0]):
            same = next((at for at in left[1] if options[1][at] == options[0][mine]), None)
            if same is not None:
                pairs.append([(0, mine), (1, same)])
                left[0].remove(mine)
                left[1].remove(same)
        while left[0] and left[1]:
            pairs.append([(0, left[0].pop(0)), (1, left[1].pop(0))])
    pairs += [[(side, at)] for side, places in enumerate(left) for at in places]
    counts = [{len(options[side][at].texts) for side, at in pair} for pair in pairs]
    if any(len(count) > 1 for count in counts):
        raise NotationError("alternatives of source and target belong together; write as many on both sides")
    if math.prod(max(count) for count in counts) > _MOST_CASES:
        raise NotationError(f"its alternatives make more than {_MOST_CASES} names; write fewer")
    for numbers in itertools.product(*(range(max(count)) for count in counts)):
        texts = [[""] * len(each) for each in options]
        alone: list[set[str]] = [set(), set()]
        for number, pair in zip(numbers, pairs, strict=True):
            for side, at in pair:
                texts[side][at] = options[side][at].texts[number]
                if len(pair) == 1:
                    alone[side].add(texts[side][at])
        yield _Choice(texts, alone)


def _read_bounds(given: object) -> Bounds:
    ends = cast("list[object]", given) if isinstance(given, list) else [given]
    if len(ends) not in (1, 2):
        raise NotationError(f"part {quoted(ends)}: give an index, or a start and an end")
    return tuple(map(Expression.read, ends))


def _read_size(name: str, size: object, alone: Sequence[set[str]], parts: Sequence[dict[str, Bounds]]) -> Expression:
    """The size of an atom; where it is a table, its parts lie side by side, and the alternative chosen has one."""
    if not isinstance(size, dict):
        return Expression.read(size)
    beside = {text: Expression.read(each) for text, each in cast("dict[str, object]", size).items()}
    chosen = [(side, text) for side in (0, 1) for text in alone[side] & beside.keys()]
    if len(chosen) > 1 or (not chosen and name not in parts[0] and name not in parts[1]):
        raise NotationError(
            f"the parts of {name} are {', '.join(map(repr, beside))}; name them as the alternatives of one side, such "
            f"as {{{','.join(beside)}}}"
        )
    for side, text in chosen:
        before = list(beside)[: list(beside).index(text)]
        parts[1 - side][name] = (
            Expression.total([beside[each] for each in before]),
            Expression.total([beside[each] for each in (*before, text)]),
        )
    return Expression.total(list(beside.values()))
