"""Loads by a table of names: a checkpoint has one framework's names and arrays, the targets another's.

    HF safetensors                              targets, as vLLM has them
    ...layers.0.self_attn.{q,k,v}_proj.weight   ...layers.0.self_attn.qkv_proj.weight: three tensors fill one
    ...layers.0.mlp.{gate,up}_proj.weight       ...layers.0.mlp.gate_up_proj.weight

The moves are those that the table makes between layouts (`reshard.names`), here from what is stored, and checked
as loads are: one error names all tensors and targets that do not go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import reshard.names
from reshard.errors import FileError, MissingTensorError, PlanError, did_you_mean, quoted
from reshard.names import NamedView, Table
from reshard.names.table import list_moves
from reshard.plans.stored import Checkpoint
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.whole import check_kind

_LISTED = 8
"""The most names of one kind in an error."""


class TargetType(NamedTuple):
    """Global shape and dtype of an array that a load can make."""

    shape: tuple[int, ...]
    dtype: str


def list_target_types(
    ckpt: Checkpoint, names: Table | str | None = None, sizes: Mapping[str, int] | None = None, rest: str = "refuse"
) -> dict[str, TargetType]:
    """What can be loaded: the tensors of a checkpoint, or what a table of names makes of them.

    An array that several tensors of different dtypes fill has that of the first. Raises what `name_moves` raises for
    tensors that no rule names.
    """
    if names is None:
        return {name: TargetType(stored.shape, stored.dtype) for name, stored in ckpt.items()}
    types: dict[str, TargetType] = {}
    for each in _resolve_stored(ckpt, names, sizes, rest):
        types.setdefault(each.target, TargetType(each.view.target_shape, ckpt[each.source].dtype))
    return types


def name_moves(
    ckpt: Checkpoint,
    targets: Mapping[str, Layout],
    names: Table | str,
    sizes: Mapping[str, int] | None = None,
    rest: str = "refuse",
) -> tuple[dict[str, Move], dict[str, str], dict[str, str]]:
    """Moves from a checkpoint's tensors to targets of a table's names, and by their names what each reads and fills.

    Their sources are `as_stored`. Where dtypes differ, moves cast. With `rest="skip"`, tensors stay unread that no
    rule names or whose target is not asked for. Raises `MissingTensorError` with all names that are left over, and
    `PlanError` for a table that does not fit the checkpoint.

    >>> from reshard.types import Mesh
    >>> from reshard.plans.stored import Stored, StoredPiece
    >>> piece = StoredPiece(((0, 4), (0, 2)), 0, 80, 32)
    >>> stored = {f"0.{name}": Stored(f"0.{name}", "float32", (4, 2), (piece,)) for name in ("gate", "up")}
    >>> ckpt = Checkpoint("model", "safetensors", (), stored)
    >>> rules = '[[rule]]\\nsource = "{l}.{gate,up}"\\ntarget = "{l}.both[{0,1}]"'
    >>> both = Layout.parse("f32[2, {tp}2, 2]", Mesh(tp=2))
    >>> moves, sources, fills = name_moves(ckpt, {"0.both": both}, rules)
    >>> sources, fills
    ({'0.gate': '0.gate', '0.up': '0.up'}, {'0.gate': '0.both', '0.up': '0.both'})
    """
    check_kind(targets, Mapping, "targets", "a dict of names and layouts")
    for name, layout in targets.items():
        check_kind(layout, Layout, f"the target {quoted(name)} of a load by a table of names", "a Layout or a sharding")
    named = _resolve_stored(ckpt, names, sizes, rest)
    filled = {each.target: each.view.target_shape for each in named}
    # All names that do not fit are in one error: whoever mends a table mends it once.
    lacking = [name for name in targets if name not in filled]
    surplus = [] if rest == "skip" else [name for name in filled if name not in targets]
    if lacking or surplus:
        known = did_you_mean(lacking[0], filled) if lacking else ""
        lines = [
            f"{_quote_names(lacking)} no tensor fills{known}; leave the targets out, or mend the table" * bool(lacking),
            f'{_quote_names(surplus)} no target asks for; give layouts, or rest="skip" to leave what fills them unread'
            * bool(surplus),
        ]
        raise MissingTensorError(f"{quoted(ckpt.path)} by names: " + "; ".join(filter(None, lines)))
    # A table says shapes; a layout of another one would be refused by its move, one at a time.
    wrong = [
        f"{quoted(name)} has shape {layout.shape}, and the tensors fill {filled[name]}"
        for name, layout in targets.items()
        if layout.shape != filled[name]
    ]
    if wrong:
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise FileError(
            f"{quoted(ckpt.path)}: {'; '.join(wrong[:_LISTED])}{more}: give layouts of the shapes that the table "
            f"makes, or other sizes"
        )
    kept = [each for each in named if each.target in targets]
    return list_moves(kept, {each.source: ckpt[each.source].as_stored for each in kept}, targets)


def _resolve_stored(
    ckpt: Checkpoint, names: Table | str, sizes: Mapping[str, int] | None, rest: str
) -> tuple[NamedView, ...]:
    """What each tensor fills, by the table."""
    table = names if isinstance(names, Table) else reshard.names.read(names)
    check_kind(sizes or {}, Mapping, "sizes", 'a dict of the sizes that the table needs, such as {"tp": 4}')
    # Found before the table is resolved, which stops at the first tensor without a rule.
    unnamed = table.list_unnamed(ckpt)
    if unnamed and rest != "skip":
        raise MissingTensorError(
            f"{quoted(ckpt.path)}: {table.name} has no rule for {_quote_names(unnamed)}; add rules, without a target "
            f'for tensors that go nowhere, or give rest="skip" not to read them'
        )
    left_out = set(unnamed)
    try:
        return table.resolve({name: each.shape for name, each in ckpt.items() if name not in left_out}, **(sizes or {}))
    except PlanError as error:
        raise PlanError(f"{quoted(ckpt.path)}: {error}") from None


def _quote_names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(map(quoted, listed[:_LISTED])) + more
