"""The nested dicts that `redistribute` takes, by the names of their arrays: tiles, layouts, moves, results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self, cast

from numpy.typing import NDArray

from reshard.errors import LayoutError, PlanError, ReshardError, TileError, quoted
from reshard.types import Layout
from reshard.types.move import Move
from reshard.types.tree_names import MOST_DEPTH, key_text

Array = NDArray[Any]
Tree = Mapping[str, Any]
Ends = tuple[Layout, Layout]
Leaf = Move | Ends


def ends_of(leaf: Leaf) -> Ends:
    """The layouts of an array before and after its move."""
    return (leaf.source, leaf.target) if isinstance(leaf, Move) else leaf


def distinct(ends: Mapping[str, Ends]) -> list[tuple[str, Ends]]:
    """The different ends, each with the first array that has them."""
    first: dict[tuple[int, int], str] = {}
    for name, (source, target) in ends.items():
        first.setdefault((id(source), id(target)), name)
    return [(name, ends[name]) for name in first.values()]


class NamedErrors:
    """A context whose errors name the array that is being looked at."""

    name = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ReshardError) and self.name:
            raise type(error)(f"{self.name}: {error}") from None


def leaves_of(tree: Tree, path: str, depth: int = 0) -> list[tuple[str, Any]]:
    """The tiles by name, as `types.tree_names` names them; only dicts are nested, since lists may be tiles."""
    if depth >= MOST_DEPTH:
        raise PlanError(f"the tree of tiles is nested more than {MOST_DEPTH} deep at {quoted(path)}")
    leaves: list[tuple[str, Any]] = []
    for key, below in tree.items():
        name = f"{path}{key_text(key, [path] if path else [])}"
        below_it = leaves_of(cast("Tree", below), f"{name}.", depth + 1) if isinstance(below, Mapping) else None
        leaves += [(name, below)] if below_it is None else below_it
    names = [name for name, _ in leaves]
    if len(set(names)) < len(names):
        raise PlanError(f"two tiles of the tree have one name, of {quoted(names)}; give each its own")
    return leaves


def unflattened(tree: Tree, moved: Mapping[str, Array | None], path: str) -> dict[Any, Any]:
    """A tree of the same structure with what has moved, by name."""
    return {
        key: unflattened(cast("Tree", below), moved, f"{path}{key}.")
        if isinstance(below, Mapping)
        else moved[f"{path}{key}"]
        for key, below in tree.items()
    }


def mapped(tree: object, leaf: Callable[[Any], Any]) -> Any:
    """A nested dict with each of its leaves changed."""
    if not isinstance(tree, Mapping):
        return leaf(tree)
    return {key: mapped(below, leaf) for key, below in cast("Mapping[Any, Any]", tree).items()}


def moves_of(source: object, target: object, flat: Mapping[str, Any]) -> dict[str, Leaf]:
    """What each tile is to do: the move that is given in place of its source, or its two layouts."""
    sources = _of_names(source, flat, "source", (Layout, Move), "a Layout or a Move; read a layout with Layout.parse")
    pairs = [name for name, given in sources.items() if not isinstance(given, Move)]
    if target is None:
        _check_moves(sources, pairs)
        return sources
    targets = _of_names(target, pairs, "target", (Layout,), "a Layout; read it with Layout.parse")
    return {name: (given, targets[name]) if name in targets else given for name, given in sources.items()}


def _check_moves(sources: Mapping[str, object], layouts: Sequence[str]) -> None:
    """Raises `LayoutError` if some tiles have a layout, to which a target belongs, in place of a move."""
    if layouts:
        name = layouts[0]
        raise LayoutError(
            f"{_of('source', name)} is the layout {sources[name]}, and no target is given; give Move(source, target), "
            f"or a source and a target"
        )


def _of(what: str, name: str) -> str:
    """How an error calls the argument for a tile: the only tile of a call has no name."""
    return f"the {what} of {name!r}" if name else f"the {what}"


def _of_names(given: object, names: Collection[str], what: str, kinds: tuple[type, ...], wanted: str) -> dict[str, Any]:
    """What is given for each array, by its name: its own, or the one for all."""
    if isinstance(given, kinds):
        return dict.fromkeys(names, given)
    if not isinstance(given, Mapping):
        raise LayoutError(f"the {what} of a tree of tiles is a {type(given).__name__}; give a dict of layouts")
    each = dict(leaves_of(cast("Tree", given), ""))
    wrong = [*(name for name in names if name not in each), *(name for name in each if name not in names)]
    if wrong:
        raise LayoutError(f"the {what} and the tiles have different names: {quoted(wrong[:4])} are in one of them only")
    other = next((name for name, one in each.items() if not isinstance(one, kinds)), None)
    if other is not None:
        raise LayoutError(f"{_of(what, other)} is {quoted(each[other])}, not {wanted}")
    return {name: each[name] for name in names}


def flat_or_none(given: object, what: str) -> dict[str, Any]:
    """What is given for some arrays of a tree, by name; nothing if it is None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TileError(f"the {what} of a tree of tiles is a {type(given).__name__}; give a dict, by the arrays' names")
    return dict(leaves_of(cast("Tree", given), ""))
