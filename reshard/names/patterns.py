"""Names of arrays with places left open.

    model.layers.{l}.mlp.{gate,up}_proj.weight      {l} is a whole number, {gate,up} one of these texts
    layers.{l}.attn.qkv[{0,1,2}]                    index 0, 1 or 2 of a new first dim

Numbers are what names of one kind differ by, so a name is looked up by its text with each number replaced by `#`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.errors import NotationError, quoted

_PIECE = re.compile(r"\{([^{}\[\]]*)\}|([^{}\[\]]+)")
_WILDCARD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile("[0-9]+")
_LONGEST = 1 << 10
_MOST_OPTIONS = 64


class Wildcard(NamedTuple):
    """A place for a whole number."""

    name: str


class Options(NamedTuple):
    """A place for one of these texts."""

    texts: tuple[str, ...]


Piece = str | Wildcard | Options


class NamePattern(NamedTuple):
    """A name's pieces, and what is in brackets after it."""

    pieces: tuple[Piece, ...]
    bracket: Piece | None

    @property
    def options(self) -> list[Options]:
        """Its alternatives, that of the index last."""
        return [piece for piece in (*self.pieces, self.bracket) if isinstance(piece, Options)]

    @property
    def wildcards(self) -> set[str]:
        """The names of its wildcards, that of the index included."""
        return {piece.name for piece in (*self.pieces, self.bracket) if isinstance(piece, Wildcard)}


def parse_name(text: object) -> NamePattern:
    """Reads a pattern; raises `NotationError` for text that is none.

    >>> parse_name("a.{l}.{q,k}[{e}]")
    NamePattern(pieces=('a.', Wildcard(name='l'), '.', Options(texts=('q', 'k'))), bracket=Wildcard(name='e'))
    """
    if not isinstance(text, str) or not text or len(text) > _LONGEST:
        raise NotationError(f'name {quoted(text)}: give text such as "layers.{{l}}.weight"')
    body, bracket, index = text.partition("[")
    if bracket:
        if not index.endswith("]") or not body:
            raise NotationError(f'name {quoted(text)}: an index ends the name, such as "qkv[{{0,1,2}}]"')
        between = _read_pieces(text, index[:-1])
        if len(between) != 1 or isinstance(between[0], str):
            raise NotationError(f"name {quoted(text)}: brackets have one {{...}}, a wildcard or numbers")
        if isinstance(between[0], Options) and not all(_NUMBER.fullmatch(each) for each in between[0].texts):
            raise NotationError(f"name {quoted(text)}: an index is a number; write {{0,1,2}}")
        return NamePattern(_read_pieces(text, body), between[0])
    return NamePattern(_read_pieces(text, body), None)


def _read_pieces(text: str, body: str) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    end = 0
    for match in _PIECE.finditer(body):
        if match.start() != end:
            break
        end = match.end()
        inside, plain = match.groups()
        if inside is None:
            pieces.append(plain)
        elif "," in inside:
            texts = tuple(inside.split(","))
            if len(set(texts)) < len(texts) or len(texts) > _MOST_OPTIONS:
                raise NotationError(f"name {quoted(text)}: {{{inside}}} has an alternative twice, or too many")
            pieces.append(Options(texts))
        elif _WILDCARD.fullmatch(inside):
            pieces.append(Wildcard(inside))
        else:
            raise NotationError(
                f"name {quoted(text)}: {{{inside}}} is neither a wildcard nor alternatives; write {{l}} or {{a,b}}"
            )
    if end != len(body) or not body:
        raise NotationError(f"name {quoted(text)}: its braces do not match; write {{l}} or {{a,b}}")
    return tuple(pieces)


@dataclass(frozen=True)
class NameTemplate:
    """A name whose only open places are wildcards: `key` is its text with # for each number, wildcards included.

    `slots` says what each # is: the digits that the pattern writes, or a wildcard.

    >>> template = NameTemplate.build(["a", "2.", Wildcard("l"), ".w"])
    >>> template.key, template.bind(("2", "17")), template.bind(("1", "17")), template.fill({"l": "3"})
    ('a#.#.w', {'l': '17'}, None, 'a2.3.w')
    """

    key: str
    slots: tuple[str | Wildcard, ...]
    text: str

    @classmethod
    def build(cls, pieces: Sequence[str | Wildcard]) -> NameTemplate:
        """The template of these pieces; raises `NotationError` where a wildcard has a number or another beside it."""
        merged: list[str | Wildcard] = []
        for piece in pieces:
            if isinstance(piece, str) and merged and isinstance(merged[-1], str):
                merged[-1] += piece
            elif piece:
                merged.append(piece)
        shown = "".join(each if isinstance(each, str) else f"{{{each.name}}}" for each in merged)
        # Two numbers side by side would read as one.
        if re.search(r"[0-9}]\{|\}[0-9]", shown):
            raise NotationError(f"name {quoted(shown)}: a wildcard stands beside a number; put text between them")
        key, slots = "", list[str | Wildcard]()
        for each in merged:
            more, numbers = split_numbers(each) if isinstance(each, str) else ("#", [each])
            key += more
            slots += numbers
        text = "".join(each.replace("%", "%%") if isinstance(each, str) else f"%({each.name})s" for each in merged)
        return cls(key, tuple(slots), text)

    def bind(self, numbers: Sequence[str]) -> dict[str, str] | None:
        """What the wildcards are where the name's numbers are these; None if it is another name."""
        if len(numbers) != len(self.slots):
            return None
        bound: dict[str, str] = {}
        for slot, number in zip(self.slots, numbers, strict=True):
            wanted = slot if isinstance(slot, str) else bound.setdefault(slot.name, number)
            if wanted != number:
                return None
        return bound

    def fill(self, bound: Mapping[str, object]) -> str:
        """The name with these numbers."""
        return self.text % bound

    @property
    def wildcards(self) -> set[str]:
        """The names of its wildcards."""
        return {slot.name for slot in self.slots if isinstance(slot, Wildcard)}


def split_numbers(name: str) -> tuple[str, list[str]]:
    """A name's key, and its numbers.

    >>> split_numbers("layers.10.w1")
    ('layers.#.w#', ['10', '1'])
    """
    return _NUMBER.sub("#", name), _NUMBER.findall(name)
