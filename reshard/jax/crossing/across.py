"""A move to other devices, compiled once: by one copy on the host, by whole tiles, or by messages.

    CPU devices of one process       `host`: the tiles are copied once, from memory to memory
    tiles that stay as they are      `jax.device_put` of each, one call
    everything else                  `stages`, with the transport that the processes need

Before and after, steps of the plan run on the source's and on the target's mesh like any other move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import xla_client

from reshard.errors import BudgetError, LayoutError
from reshard.geometry.figures import exchange_figures
from reshard.geometry.remesh import disjoint, one_set
from reshard.jax.crossing.host import (
    HostExchange,
    HostPart,
    plan_host_exchange,
    run_host_exchanges,
    shards_of,
)
from reshard.jax.crossing.stages import (
    BetweenProcesses,
    InProcess,
    compile_stages,
    flatten_mesh,
    run_stages,
    stack_shape,
    stack_shards,
)
from reshard.jax.placement import devices_of, local_shards
from reshard.jax.request import ReshardRequest, check_even, number_devices, numbered_move, plan_across
from reshard.jax.running import start_program
from reshard.lower import lower_plan
from reshard.lower.program import Exchange, Permute
from reshard.lower.to_shard_map import run_exchange as messages
from reshard.lower.to_shard_map.part_loops import cut_part
from reshard.lower.to_shard_map.part_writers import write_part
from reshard.plans.pipeline import Pipeline
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import on_jax
from reshard.runtime.on_jax import spell_stack_spec
from reshard.synth import overlapped
from reshard.types.layout import Layout

Moving = Callable[..., jax.Array]
"""Moves an array; beside it takes the array of which a part is filled, and the scale of a cast."""


def program_across(request: ReshardRequest, shape: tuple[int, ...], dtype: str) -> tuple[Plan, Moving]:
    """The plan and the compiled move of arrays of this shape and dtype to other devices; it deletes a donated source.

    Raises `LayoutError` for a target that does not divide the shape, `BudgetError` if no plan keeps to the budget.
    """
    source, target = request.ends
    whole = plan_across(request, shape, dtype)
    # What crosses runs beside the programs only on accelerators of one process; within a budget, nothing does.
    apart = not (between_processes(source, target) or on_host(source, target))
    overlaps = request.plain and apart and request.options.budget is None
    pipeline = pipeline_across(request, shape, dtype) if overlaps else None
    if pipeline is not None and pipeline.seconds < (whole.seconds or 0.0):
        check_even(whole.target, request)
        return whole, run_pipeline(pipeline, source, target, request.options.donate)
    return whole, compile_across(whole, request)


def casts_before(whole: Plan) -> bool:
    """Whether a plan casts on the source's devices."""
    return split_legs(whole).before.casts


def compile_across(
    whole: Plan, request: ReshardRequest, devices: tuple[Any, ...] | None = None, *, overwrites: bool = False
) -> Moving:
    """The compiled move by a plan whose devices are these, by their numbers; None for those of source and target.

    If it `overwrites` the array of which it fills a part, that must be a result of such a move, which nobody else has.
    """
    source, target = request.ends
    budget, donate = request.options.budget, request.options.donate
    check_even(whole.target, request)
    ends = Ends(source, target, devices or tuple(number_devices(source.mesh, target.mesh)))
    between = between_processes(source, target)
    if on_host(source, target):
        return _compile_host_move(pull_tiles(whole), ends, donate, overwrites)
    platforms = {device.platform for device in (*ends.near, *ends.far)}
    # In parts on accelerators, like every plan there.
    parted = whole if platforms == {"cpu"} else on_jax.in_parts(whole, lanes="tpu" in platforms)
    parts = cut_messages(split_legs(parted), budget, buffers=2 if between else 1, pieces=between)
    (step,) = lower_plan(parts.across).instructions
    if not between:
        # Whole tiles that go from one device to another, by the number of the device that receives.
        senders = None
        if isinstance(step, Permute):
            senders = {receiver: sender for sender, receiver in step.pairs}
        elif isinstance(step, Exchange) and messages.sends_whole_tiles(step):
            senders = {t.receiver: t.sender for t in (*step.local, *(t for each in step.rounds for t in each))}
        if senders is not None:
            return _compile_tile_move(parts, senders, ends, donate)
    if not isinstance(step, Exchange):
        raise LayoutError(f"{parts.across} does not go in messages; report this")
    near_layout, far_layout = parts.across.source, parts.across.target
    dtype = jnp.dtype(near_layout.dtype)
    meshes = flatten_mesh(ends.source.mesh), flatten_mesh(ends.target.mesh)
    transport = BetweenProcesses(meshes, ends.devices, dtype) if between else InProcess(meshes, ends.devices)
    exchange = compile_stages(step, near_layout, far_layout, meshes, transport, dtype)
    before, finish = _compile_before(parts.before, ends.source, donate), _compile_after(parts.after, ends.target)
    sends = bool(ends.source.addressable_devices)
    fills = step.fills and transport.receives

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        near = before(x, scale) if sends else x
        stack = stack_shards(local_shards(near), meshes[0], near_layout, dtype) if sends else None
        old = None
        if fills and into is not None:
            old = stack_shards(local_shards(into), meshes[1], far_layout, dtype)
            old = old if overwrites else old.copy()
        far = run_stages(exchange, stack, donate or near is not x, old)
        if donate and not x.is_deleted():
            x.delete()
        return finish([] if far is None else local_shards(far), into, scale)

    return moved


def compile_copies(whole: Plan, request: ReshardRequest) -> HostMove | None:
    """The move on one set of CPU devices of this process as copies; None where a program is needed, or nothing moves.

    In a tree it takes a fraction of the time of its program, which writes every replica and waits for all devices.
    """
    source, target = request.ends
    meshes = isinstance(source.mesh, JaxMesh) and isinstance(target.mesh, JaxMesh)
    if not meshes or not on_host(source, target):
        return None
    if not whole.steps or request.dtype is not None or whole.source.partial or whole.target.partial:
        return None
    across = _plan_of_step(Step("exchange", whole.source, whole.target, StepMode(view=request.view)), False)
    ends = Ends(source, target, tuple(number_devices(source.mesh)))
    legs = Legs(Leg(whole.source), across, Leg(whole.target))
    return _compile_host_move(legs, ends, request.options.donate, overwrites=False, shares=True)


class Ends(NamedTuple):
    """Where a move starts and ends; the devices by their numbers in its plan."""

    source: NamedSharding
    target: NamedSharding
    devices: tuple[Any, ...]

    @property
    def near(self) -> list[Any]:
        """The devices of the source, by position."""
        return devices_of(self.source.mesh)

    @property
    def far(self) -> list[Any]:
        """The devices of the target, by position."""
        return devices_of(self.target.mesh)


def between_processes(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether some device is of another process."""
    return not (source.is_fully_addressable and target.is_fully_addressable)


def on_host(*ends: NamedSharding) -> bool:
    """Whether all devices are CPUs of this process, whose shards numpy reads where they are."""
    platforms = {device.platform for end in ends for device in devices_of(end.mesh)}
    return platforms == {"cpu"} and all(end.is_fully_addressable for end in ends)


@dataclass(frozen=True, eq=False)
class HostMove:
    """A move between CPU devices of one process, compiled; `run_host_moves` makes many at once.

    `join` makes the target of the exchange's tiles; None if `finish` makes it of shards. It has `steps` beside the
    exchange, and its result `nbytes`.
    """

    exchange: HostExchange
    before: Moving
    finish: Moving
    ends: Ends
    join: Callable[[Sequence[Any]], jax.Array] | None
    steps: bool
    nbytes: int
    donate: bool
    overwrites: bool

    def __call__(self, x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        if self.steps or self.donate or into is not None:
            return run_host_moves([HostCall(self, x, self.donate, into, scale)])[0]
        return self.make_result(run_host_exchanges([HostPart(self.exchange, x)])[0], None, None)

    def make_result(self, tiles: Sequence[Any], into: jax.Array | None, scale: jax.Array | None) -> jax.Array:
        """The target from the exchange's tiles."""
        if self.join is not None:
            return self.join(tiles)
        return self.finish(jax.device_put([tiles[at] for at in self.exchange.tile_at], self.ends.far), into, scale)


class HostCall(NamedTuple):
    """A move of an array, what it reads beside it, and the number of the array that it makes or fills a part of.

    With `donate`, the array is deleted once no call reads it any more.
    """

    move: HostMove
    x: jax.Array
    donate: bool
    into: jax.Array | None = None
    scale: jax.Array | None = None
    result: int = 0


def _compile_host_move(parts: Legs, ends: Ends, donate: bool, overwrites: bool, shares: bool = False) -> HostMove:
    (step,) = parts.across.steps
    exchange = plan_host_exchange(step.operand, step.result, step.mode.view, fresh=step.mode.fresh, shares=shares)
    before, finish = _compile_before(parts.before, ends.source, False), _compile_after(parts.after, ends.target)
    join = None
    if not parts.after.steps:
        join = compile_join(parts.after.target.shape, ends.target, (exchange.then or exchange).tile_at)
    steps, nbytes = bool(parts.before.steps or parts.after.steps), step.result.nbytes(exchange.elements)
    return HostMove(exchange, before, finish, ends, join, steps, nbytes, donate, overwrites)


def compile_join(
    shape: tuple[int, ...], target: NamedSharding, tile_at: Sequence[int]
) -> Callable[[Sequence[Any]], jax.Array]:
    """Makes the target of its tiles, which it takes as they are; `tile_at` are their numbers by position."""
    devices = devices_of(target.mesh)
    numbers: dict[Any, int] = dict(
        zip(map(target.devices_indices_map(shape).__getitem__, devices), tile_at, strict=True)
    )
    # What JAX itself does in the end takes half of the time once the type of the result is known.
    put: Any = getattr(xla_client, "batched_device_put", None)
    types: list[Any] = []

    def join(tiles: Sequence[Any]) -> jax.Array:
        if put is not None and types:
            return put(types[0], target, [tiles[at] for at in tile_at], devices, True, enable_x64=True)
        made = jax.make_array_from_callback(shape, target, lambda index: tiles[numbers[index]])
        types.append(made.aval)
        return made

    return join


def run_host_moves(calls: Sequence[HostCall]) -> dict[int, jax.Array]:
    """The moved arrays by their numbers. Those that parts fill are made once; most calls are one exchange together."""
    moved: dict[int, jax.Array] = {}
    uses = Counter(id(call.x) for call in calls)
    donated = {id(call.x) for call in calls if call.donate}
    for turn in _list_copy_turns(calls):
        parts: list[HostPart] = []
        old: dict[int, list[jax.Array]] = {}
        spent: list[jax.Array] = []
        for move, x, _, into, scale, number in turn:
            near, alone = move.before(x, scale), uses[id(x)] == 1
            uses[id(x)] -= 1
            over = id(x) in donated and not uses[id(x)]
            if over and near is not x:  # Others of this turn may still read it.
                x.delete() if alone else spent.append(x)
            parts.append(HostPart(move.exchange, near, over or near is not x, number))
            if move.exchange.fills and into is not None and number not in old:
                shards = shards_of(into)
                # Replicas are one memory in what was made here, and are not in what XLA has made.
                held = {(tile, shards[at].unsafe_buffer_pointer()) for at, tile in enumerate(move.exchange.tile_at)}
                if move.overwrites and len(held) == move.exchange.tiles:
                    moved[number] = into
                old[number] = [shards[move.exchange.tile_at.index(each)] for each in range(move.exchange.tiles)]
        tiles = run_host_exchanges(parts, old, moved.keys() & old.keys())
        for x in spent:
            x.delete()
        for move, _, _, into, scale, number in turn:
            if number not in moved:
                moved[number] = move.make_result(tiles[number], into, scale)
    return moved


TURN = 32 << 20
"""Bytes of the results of a turn; a larger one has a turn of its own."""


def _list_copy_turns(calls: Sequence[HostCall]) -> Iterator[list[HostCall]]:
    """The calls that run together: first all that need only their results, then, a few at a time, those that free
    memory, their donated sources or what their steps leave behind.
    """
    by_result: dict[int, list[HostCall]] = {}
    for call in calls:
        by_result.setdefault(call.result, []).append(call)
    turn: list[HostCall] = []
    waiting: list[list[HostCall]] = []
    for group in by_result.values():
        if any(call.donate or call.move.steps for call in group):
            waiting.append(group)
        else:
            turn += group
    if turn:
        yield turn
    turn, room = [], TURN
    for group in waiting:
        nbytes = group[0].move.nbytes
        if turn and nbytes > room:
            yield turn
            turn, room = [], TURN
        turn = [*turn, *group]
        room -= nbytes
    if turn:
        yield turn


def _compile_tile_move(parts: Legs, pairs: dict[int, int], ends: Ends, donate: bool) -> Moving:
    """Whole tiles; `pairs` is the number of the device that sends, by that of each that receives."""
    before, finish = _compile_before(parts.before, ends.source, donate), _compile_after(parts.after, ends.target)
    senders = [ends.devices[pairs[number]] for number in parts.across.target.mesh.devices]
    positions = [ends.near.index(device) for device in senders]

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        near = before(x, scale)
        held = shards_of(near)
        sent = [held[at] for at in positions]
        shards = jax.device_put(sent, ends.far)
        shards = [one.copy() if one.device == other.device else one for one, other in zip(shards, sent, strict=True)]
        if donate or near is not x:
            near.delete()
        return finish(shards, into, scale)

    return moved


def _compile_before(leg: Leg, source: NamedSharding, donate: bool) -> Moving:
    """The steps on the source's devices, to tiles of which each is a shard."""
    run = on_jax.compile_to_stack(leg.source, leg.steps, source.mesh) if leg.steps else None

    def before(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        if run is None:
            return x
        near = start_program(run, x, scale) if leg.casts and scale is not None else start_program(run, x)
        if donate:
            x.delete()
        return near

    return before


def _compile_after(leg: Leg, target: NamedSharding) -> Moving:
    """The steps on the target's devices, from this process's tiles; without any, the tiles as shards of the target."""
    end, dtype = leg.target, jnp.dtype(leg.target.dtype)

    def join(shards: list[jax.Array], into: jax.Array | None, scale: jax.Array | None) -> jax.Array:
        return jax.make_array_from_single_device_arrays(end.shape, target, shards, dtype=dtype)

    if not leg.steps or not target.addressable_devices:
        return join
    run, sharding = on_jax.compile_from_stack(leg.source, leg.steps, target.mesh, target)
    fills = any(step.mode.fills for step in leg.steps)

    def finish(shards: list[jax.Array], into: jax.Array | None, scale: jax.Array | None) -> jax.Array:
        stack = jax.make_array_from_single_device_arrays(stack_shape(leg.source), sharding, shards)
        return start_program(run, stack, into if fills else None, scale if leg.casts else None)

    return finish


# A move to other devices in parts: each is gathered on the target's devices while the next one crosses.
#
#     source's devices      take 0  take 1          take 2          take 3
#     between the two               messages 0      messages 1      messages 2      messages 3
#     target's devices                              gather 0, put   gather 1, put   gather 2, put
#
# JAX starts programs and copies and does not wait for them. Part c + 1 is started right after the gather of part c, and
# the one after it once that gather is done: a device has two parts at once beside its tile. Copies between devices of
# one process run beside programs on accelerators; between processes a crossing is a program of its own on the target's
# devices, and on CPUs it is the same memory, so neither has anything to overlap.


def pipeline_across(request: ReshardRequest, shape: tuple[int, ...], dtype: str) -> Pipeline | None:
    """The pipeline of least predicted seconds on a network that a caller named; None if there is none."""
    source, target = request.ends
    network = request.options.network
    if network is None:
        return None
    move = numbered_move(request, number_devices(source.mesh, target.mesh), shape, dtype)
    return overlapped(move.source, move.target, network)


def run_pipeline(
    pipeline: Pipeline, source: NamedSharding, target: NamedSharding, donate: bool
) -> Callable[[jax.Array], jax.Array]:
    """The compiled move; it deletes a donated source."""
    whole, each, (near_cut, far_cut) = pipeline.plan, pipeline.each, pipeline.cuts
    far, dtype = each.steps[0].result, jnp.dtype(whole.source.dtype)
    meshes = flatten_mesh(source.mesh), flatten_mesh(target.mesh)
    # A part crosses in messages even where its tiles stay whole: it is written into the target's tiles in place.
    (step,) = lower_plan(chain(each.source, far, [StepSpec("exchange", far)], donate=True)).instructions
    if not isinstance(step, Exchange):
        raise LayoutError(f"{each.source} -> {far} does not go in messages; report this")
    transport = InProcess(meshes, list(number_devices(source.mesh, target.mesh)))
    crossing = compile_stages(step, each.source, far, meshes, transport, dtype)
    gather, sharding = on_jax.compile_from_stack(far, each.steps[1:], target.mesh, target)
    stack = NamedSharding(meshes[1], spell_stack_spec(meshes[1], whole.target))
    start = jax.jit(lambda: jnp.zeros(stack_shape(whole.target), dtype), out_shardings=stack)

    # Programs that cut a part, of a given number, out of the source's tiles, and write it into the target's in place.
    here, one = (spell_stack_spec(meshes[0], end) for end in (whole.source, each.source))
    there, other = (spell_stack_spec(meshes[1], end) for end in (whole.target, each.target))
    spread, number_spec = partial(jax.shard_map, check_vma=False), PartitionSpec()
    taken = jax.jit(spread(partial(cut_part, near_cut), mesh=meshes[0], in_specs=(here, number_spec), out_specs=one))
    written = jax.jit(
        spread(partial(write_part, far_cut), mesh=meshes[1], in_specs=(there, other, number_spec), out_specs=there),
        donate_argnums=0,
    )

    def moved(x: jax.Array) -> jax.Array:
        near = stack_shards(local_shards(x), meshes[0], whole.source, dtype)
        goal, arriving = start_program(start), run_stages(crossing, start_program(taken, near, np.int32(0)), True)
        for number in range(pipeline.parts):
            shards = [] if arriving is None else local_shards(arriving)
            tiles = jax.make_array_from_single_device_arrays(stack_shape(far), sharding, shards)
            part = stack_shards(local_shards(start_program(gather, tiles)), meshes[1], each.target, dtype)
            goal = start_program(written, goal, part, np.int32(number))
            del part, tiles, shards
            if number + 1 < pipeline.parts:  # A part is freed once it is packed.
                arriving = run_stages(crossing, start_program(taken, near, np.int32(number + 1)), True)
            elif donate:
                for array in (near, x):
                    if not array.is_deleted():
                        array.delete()
            jax.block_until_ready(goal)
        return jax.make_array_from_single_device_arrays(whole.target.shape, target, local_shards(goal), dtype=dtype)

    return moved


# The legs of a plan to other devices.
#
#     trainer <fsdp=4>, devices 0-3 -> server <tp=2, rep=2>, devices 4-7, f32[{fsdp}4, 8] -> f32[16, {tp}4]
#
#     before    nothing to do, a sum would be finished    on devices 0-3
#     across    exchange to f32[{rep}8, {tp}4]            0-3 to 4-7
#     after     all_gather to f32[16, {tp}4]              on devices 4-7


class Leg(NamedTuple):
    """Steps on the devices of one side, and what they start from."""

    source: Layout
    steps: tuple[Step, ...] = ()

    @property
    def target(self) -> Layout:
        """What the steps lead to."""
        return self.steps[-1].result if self.steps else self.source

    @property
    def casts(self) -> bool:
        """Whether a step casts."""
        return self.source.dtype != self.target.dtype


class Legs(NamedTuple):
    """A plan to other devices in three; `before` and `after` may have no steps, `across` has one."""

    before: Leg
    across: Plan
    after: Leg


def split_legs(whole: Plan) -> Legs:
    """The plan in its three legs; what a leg starts from is deleted unless it is the caller's array.

    Messages between JAX's arrays keep their dtype: a crossing that casts on the way has its cast in the leg before, if
    it narrows or fills part of a target, else in the leg after.
    """
    at = next(number for number, step in enumerate(whole.steps) if not one_set(step.operand.mesh, step.result.mesh))
    step, before, after = whole.steps[at], whole.steps[:at], whole.steps[at + 1 :]
    operand, result = step.operand, step.result
    if operand.dtype != result.dtype:
        if step.mode.fills or step.wire.dtype != operand.dtype:
            operand = replace(operand, dtype=result.dtype)
            before = (*before, Step("cast", step.operand, operand))
        else:
            result = replace(result, dtype=operand.dtype)
            after = (Step("cast", result, step.result), *after)
        step = Step(step.kind, operand, result, step.mode)
    return Legs(Leg(whole.source, before), _plan_of_step(step, whole.donate), Leg(result, after))


def _plan_of_step(step: Step, donate: bool) -> Plan:
    """The step that crosses as a plan."""
    return chain(step.operand, step.result, [step.spec], donate, None, step.mode.view)


def pull_tiles(whole: Plan) -> Legs:
    """The legs with the target's tiles read from the source's at once, where no sum is started.

    Where all devices share one memory, gathers among the target's devices would copy data a second time, and so would
    reshapes and transposes.
    """
    parts, view = split_legs(whole), whole.view
    if whole.target.partial:
        return parts
    before, after, mode = parts.before, Leg(whole.target), StepMode()
    if view is not None and not (view.plain and not before.casts and not parts.after.casts):
        # The whole view is in the exchange, between its casts.
        first, last = whole.steps[:1], whole.steps[-1:]
        before = Leg(whole.source, first if first[0].kind == "cast" else ())
        after = Leg(whole.target) if last[0].kind != "cast" else Leg(last[0].operand, last)
        # A sum is finished first, and a cast in between comes before a part of the target is filled.
        if whole.source.partial or (before.casts, after.casts) != (parts.before.casts, parts.after.casts):
            return parts
        mode = mode if view.plain else StepMode(view=view)
    return Legs(before, _plan_of_step(Step("exchange", before.target, after.source, mode), whole.donate), after)


def cut_messages(parts: Legs, budget: int | None, buffers: int, pieces: bool) -> Legs:
    """The legs as accelerators and several processes run them: messages that are small beside the tiles.

    A device has `buffers` buffers of a message's size beside its tiles, and two if it may send and receive at once.
    Large moves are cut so that these are small, and with a budget they are cut to fit; `BudgetError` if not even single
    elements do. With `pieces`, tiles that go to other devices as they are become messages, too.
    """
    step = parts.across.steps[0]
    if step.kind == "permute" and not pieces:
        return parts
    operand, result = step.operand, step.result
    mode = step.mode._replace(chunk=None, parts=1, overlap=False)
    kept = parts.before.source.tile_bytes if parts.before.steps and not parts.across.donate else 0
    plain = Step("exchange", operand, result, mode, kept)
    message = exchange_figures(operand, result, mode.view, relayed=mode.relay).message
    given = step.mode.chunk or message
    tiles = plain.live_bytes - plain.cost.scratch
    buffers = 2 if mode.relay or not disjoint(operand.mesh, result.mesh) else buffers
    chunk = given
    if budget is not None:
        chunk = min(given, (budget - tiles) // (buffers * operand.nbytes(1)))
        if chunk < 1 <= message:
            least = tiles + buffers * operand.nbytes(1)
            raise BudgetError(
                f"budget {budget} B is too small for {operand} -> {result} (global {operand.shape}, {operand.mesh} to "
                f"{result.mesh}): beside tiles of {tiles} B a device needs {buffers} times the smallest message; "
                f"the smallest that works is {least} B",
                least,
            )
    elif operand.tile_bytes + result.tile_bytes >= on_jax.LEAST:
        chunk = -(-message // on_jax.PARTS)
    cut = mode if chunk >= message else mode._replace(chunk=chunk)
    return Legs(parts.before, _plan_of_step(Step("exchange", operand, result, cut), parts.across.donate), parts.after)
