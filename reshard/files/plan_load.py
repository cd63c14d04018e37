"""`reshard.files.plan_load`: what a load reads and moves, before it does.

    targets                      moves                                    process of each device
    {name: Layout}, or mesh=     from the stored tensor of that name      its own, or as `processes=` says
    {name: Move}                 as they are, `sources=` and `fills=`     the same
    a table of names             those of the table (`name_moves`)        the same
    a tree of shardings          those of `reshard.jax`                   the one that has the device

All that does not go together is one error, with all names: before a byte is read, and the same in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from os import PathLike
from typing import Any, NamedTuple, cast

import reshard.names
from reshard.errors import (
    FileError,
    MissingTensorError,
    NamedErrors,
    PlanError,
    ReshardError,
    did_you_mean,
    join_first,
    name_arguments,
    quote_first,
    quoted,
)
from reshard.files.open import open as open_checkpoint
from reshard.geometry.detect import as_layout
from reshard.names import NamedView, Table
from reshard.names.table import list_moves
from reshard.plans.load_plan import LoadPlan
from reshard.plans.plan_data import flatten_tree
from reshard.plans.stored import Checkpoint, StoredFile
from reshard.synth import Network
from reshard.synth.options import read_budget, read_network
from reshard.synth.reading import ReadOptions, plan_reading
from reshard.types.layout import Layout
from reshard.types.mesh import MeshLike
from reshard.types.move import Move
from reshard.types.whole import check_kind, whole

_LISTED = 8
"""The most names of one kind in an error."""


class AskedLoad(NamedTuple):
    """The moves of a load, as `plan_tree` takes them, and the process of each device, None where each is its own.

    `shardings` is what `reshard.jax.loading` has read, where the targets are shardings.
    """

    moves: Mapping[str, Move]
    sources: Mapping[str, str]
    fills: Mapping[str, str]
    process_of: Mapping[int, int] | None = None
    shardings: Any = None


@name_arguments
def plan_load(
    ckpt: Checkpoint | str | PathLike[str],
    targets: Any,
    *,
    mesh: MeshLike | None = None,
    comm: Any = None,
    devices: Any = None,
    processes: int | Mapping[int, int] | None = None,
    names: Table | str | None = None,
    sizes: Mapping[str, int] | None = None,
    sources: Mapping[str, str] | None = None,
    fills: Mapping[str, str] | None = None,
    rest: str = "refuse",
    budget: int | str | None = None,
    read_size: int | str = "1MiB",
    network: Any = None,
    wave: int | str | None = None,
) -> LoadPlan:
    """The plan of a load: who reads which bytes, in which waves, and how they move from there. Reads no element.

    `targets` is a dict, nested or not, of names and what each becomes: a `Layout`, or a `Move` whose source is
    `ckpt[name].as_stored`, for which the plan puts the layout in which the tensor is read; or a tree of shardings. With
    `mesh`, a target is whatever says a layout on it, such as "P('x')" or a `PartitionSpec` (`reshard.as_layout`). With
    `names`, a table of names or its name, targets have the names that the table makes, and `sizes` are those that it
    needs. `sources` and `fills` name by moves the tensors that they read and the targets that they fill, where that is
    not one of the move's own name. `rest="skip"` leaves tensors unread that no target names.

    Each device is a process, as with `comm`, unless `processes` says how many there are, each with as many devices in a
    row, or which one each device belongs to; with `devices`, all are in this one. `budget` bounds the bytes of arrays
    in a process: results, two waves of readings, buffers. A read of `read_size` bytes takes twice as long as one of a
    few: smaller ones are avoided as far as it pays. `wave` is the most that one stages. With a `network`, seconds are
    predicted.

    Raises `MissingTensorError` and `FileError` for names, shapes and dtypes that do not go together, and `BudgetError`
    with the smallest budget that works.
    """
    if not isinstance(ckpt, Checkpoint):
        ckpt = open_checkpoint(ckpt)
    # Without shardings, processes are the caller's to say; a plan knows devices alone.
    asked = read_targets(ckpt, targets, mesh=mesh, names=names, sizes=sizes, sources=sources, fills=fills, rest=rest)
    process_of = asked.process_of if asked.process_of is not None else _read_processes(asked.moves, devices, processes)
    # A read of no bytes would cost nothing, and any number of them as much.
    size = read_budget(read_size, "read_size")
    if not size:
        raise PlanError(f'read_size {quoted(read_size)}: give at least 1 byte, or text such as "1MiB"')
    options = ReadOptions(size, read_budget(wave, "wave"), read_budget(budget))
    given = (asked.moves, asked.sources, asked.fills, process_of or {})
    problem = _LoadProblem(
        ckpt, ckpt.files, tuple(tuple(each.items()) for each in given), process_of is None, options,
        read_network(network),
    )  # fmt: skip
    return _plan_problem(problem) if ckpt.files else _plan_problem.__wrapped__(problem)


@dataclass(frozen=True)
class _LoadProblem:
    """What a load is planned from. Files that are the same, by size and time of change, have the same tensors."""

    ckpt: Checkpoint = field(compare=False)
    files: tuple[StoredFile, ...]
    given: tuple[tuple[tuple[Any, Any], ...], ...]
    each_alone: bool
    options: ReadOptions
    network: Network | None


@lru_cache(maxsize=8)
def _plan_problem(problem: _LoadProblem) -> LoadPlan:
    # A checkpoint is often loaded again, as by each replica that starts: planning is a third of a load of 250 MiB that
    # is in the page cache.
    ckpt, (moves, sources, fills, process_of) = problem.ckpt, (dict(each) for each in problem.given)
    plan = plan_reading(
        ckpt, moves, sources, fills, None if problem.each_alone else process_of, problem.options, problem.network
    )
    return replace(plan, format=ckpt.format)


def list_layout_targets(targets: object, mesh: MeshLike | None) -> dict[str, Any] | None:
    """Targets by name, if they are layouts, moves, or what says a layout on `mesh`; None for a tree that jax reads."""
    # A zarr store that is one array has it under the empty name; else jax knows the tree.
    leaves: dict[str, Any] = {"": targets}
    if type(targets) is dict:
        leaves = flatten_tree(cast("object", targets))
    elif mesh is not None or isinstance(targets, str):
        raise PlanError(f"the targets are {quoted(targets)}; give a dict of names and layouts")
    said = mesh is not None or all(isinstance(leaf, Layout | Move | str) for leaf in leaves.values())
    return leaves if said else None


def read_targets(
    ckpt: Checkpoint,
    targets: Any,
    *,
    mesh: MeshLike | None = None,
    names: Table | str | None = None,
    sizes: Mapping[str, int] | None = None,
    sources: Mapping[str, str] | None = None,
    fills: Mapping[str, str] | None = None,
    rest: str = "refuse",
) -> AskedLoad:
    """The moves that targets of a load ask for; raises the errors of `plan_load` for what does not go together."""
    if rest not in ("refuse", "skip"):
        raise PlanError(f'rest={quoted(rest)} is neither "refuse" nor "skip"')
    leaves = list_layout_targets(targets, mesh)
    if leaves is None:
        # Only shardings need jax, and whoever gives them has loaded it.
        loading = import_module("reshard.jax.loading")
        types = list_target_types(ckpt, names, sizes, rest)
        stored = None if names is not None else {name: each.as_stored for name, each in ckpt.items()}
        read: Any = loading.read_target_shardings(targets, types, stored)
        asked = _name_asked(ckpt, read.targets, names, sizes, read.sources, read.fills, rest)
        return asked._replace(process_of=read.process_of, shardings=read)
    if said := [name for name, leaf in leaves.items() if not isinstance(leaf, Layout | Move)]:
        types = list_target_types(ckpt, names, sizes, rest)
        reads = {name: (sources or {}).get(name, name) for name in said}
        # Names that are not there become one error with all others.
        for name, read in reads.items():
            try:
                leaves[name] = as_layout(leaves[name], mesh, *types[read]) if read in types else leaves[name]
            except ReshardError as error:
                # Text that says another shape or dtype is a layout all the same, to be compared with what is stored.
                try:
                    leaves[name] = as_layout(leaves[name], mesh)
                except ReshardError:
                    raise error from None
    return _name_asked(ckpt, leaves, names, sizes, sources, fills, rest)


def _name_asked(
    ckpt: Checkpoint,
    leaves: Mapping[str, Any],
    names: Table | str | None,
    sizes: Mapping[str, int] | None,
    sources: Mapping[str, str] | None,
    fills: Mapping[str, str] | None,
    rest: str,
) -> AskedLoad:
    """The moves of leaves that are layouts and moves, checked against what is stored."""
    # A table says what reads and fills what; there are no two ways to say it.
    if names is not None:
        if sources or fills:
            raise PlanError("names= says what each tensor fills; leave out sources= and fills=")
        return AskedLoad(*name_moves(ckpt, leaves, names, sizes, rest))
    # What is missing, what is left over and what differs is found for all names before any of it is an error.
    reads, filled = ({name: (given or {}).get(name, name) for name in leaves} for given in (sources, fills))
    odd = sorted({*(sources or ()), *(fills or ())} - {*leaves})
    if odd:
        raise PlanError(f"sources= and fills= name {quoted(odd[:_LISTED])}, which are no moves of the load")
    missing = [name for name in leaves if reads[name] not in ckpt]
    unread = set(ckpt) - set(reads.values())
    left = [] if rest == "skip" else [name for name in ckpt if name in unread]
    wrong: list[str] = []
    moves: dict[str, Move] = {}
    for name, leaf in leaves.items():
        if reads[name] not in ckpt:
            continue
        stored = ckpt[reads[name]]
        given = (stored.shape, stored.dtype)
        plain = isinstance(leaf, Layout)
        wanted = leaf if plain else cast(Move, leaf).source
        if (wanted.shape, wanted.dtype) != given or wanted.partial:
            what = "the target" if plain else "the move's source"
            advice = ""
            if wanted.partial:
                advice = "; a load cannot fill a sum: leave out the partial axes"
            elif plain and wanted.shape == stored.shape:
                advice = f"; to cast, give rs.Move(ckpt[{reads[name]!r}].as_stored, layout, cast=True)"
            wrong.append(f"{quoted(name)}: {what} {wanted} is not {stored.dtype} of shape {stored.shape}{advice}")
        elif isinstance(leaf, Layout):
            moves[name] = Move(stored.as_stored, leaf)
        else:
            moves[name] = leaf
    if not (missing or left or wrong):
        return AskedLoad(moves, reads, filled)
    # One error has all of it: whoever mends a long list of targets mends it once.
    lines: list[str] = []
    if missing:
        first = did_you_mean(reads[missing[0]], ckpt)
        if set("*?").intersection(missing[0]):
            first = ": a pattern is no name; give {name: ... for name in ckpt}"
        listed = quote_first([reads[name] for name in missing])
        lines.append(f"there is no tensor {listed}{first}; name stored tensors, by targets or by sources=")
    if left:
        lines.append(f'no target names {quote_first(left)}; give them, or rest="skip" to leave them unread')
    if wrong:
        lines.append(join_first(wrong, between="; "))
    error = MissingTensorError if missing or left else FileError
    raise error(f"{quoted(ckpt.path)}: {'; '.join(lines)}")


def _read_processes(
    moves: Mapping[str, Move], devices: Any, processes: int | Mapping[int, int] | None
) -> Mapping[int, int] | None:
    """The process of each device of the targets, None where each is its own."""
    if processes is None and devices is None:
        return None
    every = sorted({device for mesh in {move.target.mesh for move in moves.values()} for device in mesh.devices})
    if processes is None:
        return dict.fromkeys(every, 0)
    if isinstance(processes, Mapping):
        lacking = [device for device in every if whole(processes.get(device)) is None]
        if lacking:
            raise PlanError(f"processes= has no process for the devices {quoted(lacking[:_LISTED])}; give one for each")
        return {device: processes[device] for device in every}
    # A process has as many devices as any other, and these in a row.
    count = whole(processes, 1)
    if count is None or len(every) % count:
        raise PlanError(
            f"processes={quoted(processes)}: give a number that divides the {len(every)} devices, or a dict of the "
            f"process of each device"
        )
    # In the order of their numbers, as launchers and `jax.distributed` deal devices out.
    return {device: at * count // len(every) for at, device in enumerate(every)}


# Loads by a table of names: a checkpoint has one framework's names and arrays, the targets another's.
#
#     HF safetensors                              targets, as vLLM has them
#     ...layers.0.self_attn.{q,k,v}_proj.weight   ...layers.0.self_attn.qkv_proj.weight: three tensors fill one
#     ...layers.0.mlp.{gate,up}_proj.weight       ...layers.0.mlp.gate_up_proj.weight
#
# The moves are those that the table makes between layouts (`reshard.names`), here from what is stored, and checked
# as loads are: one error names all tensors and targets that do not go together.


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
            f"{quote_first(lacking)} no tensor fills{known}; leave the targets out, or mend the table" * bool(lacking),
            f'{quote_first(surplus)} no target asks for; give layouts, or rest="skip" to leave what fills them unread'
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
        raise FileError(
            f"{quoted(ckpt.path)}: {join_first(wrong, between='; ')}: give layouts of the shapes that the table makes, "
            f"or other sizes"
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
            f"{quoted(ckpt.path)}: {table.name} has no rule for {quote_first(unnamed)}; add rules, without a target "
            f'for tensors that go nowhere, or give rest="skip" not to read them'
        )
    left_out = set(unnamed)
    with NamedErrors(quoted(ckpt.path)):
        return table.resolve({name: each.shape for name, each in ckpt.items() if name not in left_out}, **(sizes or {}))
