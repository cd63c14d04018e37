"""What a plan takes on a TPU beside its wires, by how its steps are spelled: passes over memory, and kernels.

    bf16[192, 192, 128, {x}8] -> bf16[192, {x}24, 128, 64] on <x=8>, tiles of 72 MiB, us of v5p

    at once       packed 151, put together 151                                      peak 2.0 times source and target
    in 4 parts    blocks cut out of the tile 144, written to the result 184         peak 1.25, 64 kernels
    in 8 parts    184 and 218                                                       peak 1.13, 128 kernels

What a collective receives lies where all chips know it, so it is always copied once more, to the result. A part has to
be cut out before it is sent; at once, a tile that is sent as it lies is not copied before.

The constants of `FormCosts` are fitted to what libtpu estimates of compiled programs (`hlo.compiled_cycles`) by
`python benchmarks/fit_forms.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from reshard.geometry.refine import refine
from reshard.geometry.remesh import one_set
from reshard.lower import lower_plan
from reshard.lower.colouring import SPREAD, EvenRounds
from reshard.lower.groups import groups_along
from reshard.lower.program import AllToAll, Exchange, InParts, Program
from reshard.lower.to_shard_map import (
    choose_memory_order,
    choose_part_form,
    count_padded_bytes,
    lie_in_turn,
    measure_padding,
)
from reshard.lower.to_shard_map.part_loops import are_unrolled, group_steps
from reshard.plans.plan import Plan, Step
from reshard.synth.cost import time_on_network
from reshard.synth.cuts import bound_groups, bound_round
from reshard.synth.network import Network
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh


@dataclass(frozen=True)
class FormCosts:
    """What a chip does in a cycle of its TensorCores, of which it has `hertz` a second; a `wire` has bytes a second.

    Bytes that kernels copy from memory to memory, `load` from there onto the chip, move where another dim becomes minor
    (`turn`; of parts, `turn_part`), or put together along the minor dim (`join`); the cycles in which a `kernel`
    starts; and the bytes up to which a part is `on_chip`.
    """

    hertz: float
    wire: float
    copy: float
    load: float
    turn: float
    turn_part: float
    join: float
    kernel: float
    on_chip: int


TPU_COSTS = FormCosts(
    hertz=1.75e9, wire=1.8e11, copy=286, load=340, turn=175, turn_part=130, join=110, kernel=1850, on_chip=32 << 20
)
"""What libtpu estimates for v5p, jax 0.12.0.1. The clock is a chip's 459 TFLOP/s over 2 x 128 x 128 for each of its 8
matrix units (Cloud TPU docs, v5p)."""


BOUNDED = 1 << 14
"""The most devices, over all rounds of an exchange, whose messages are followed over the wires."""


class Pass(NamedTuple):
    """One pass over memory: so many bytes at a rate of `FormCosts`, by so many kernels."""

    nbytes: float
    rate: str
    kernels: int = 1


def estimate_local_seconds(plan: Plan) -> float:
    """The seconds of all that a plan does beside its collectives, as it is spelled.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> move = plan(*(Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, {x}64, 512]", "bf16[{x}64, 512, 512]")))
    >>> f"{estimate_local_seconds(move) * 1e6:.0f} us"
    '68 us'
    """
    costs, cycles = TPU_COSTS, 0.0
    for one in list_passes(plan):
        # What a kernel loads onto the chip is less than what there is, or it stays in memory.
        on_chip = one.rate != "load" or one.nbytes <= one.kernels * costs.on_chip
        rate = float(getattr(costs, one.rate if on_chip else "copy"))
        cycles += one.nbytes / rate + one.kernels * costs.kernel
    return cycles / costs.hertz


def estimate_form_seconds(plan: Plan, network: Network | None = None) -> float:
    """The seconds of a plan as it is spelled: its wires, by a network or as its steps say, and what is beside them."""
    wires = sum_wire_seconds(plan, TPU_COSTS.wire) if network is None else time_compiled_wires(plan, network)
    return estimate_local_seconds(plan) + wires


def time_compiled_wires(plan: Plan, network: Network) -> float:
    """The seconds of a plan's wires as XLA runs its collectives: one after another, an exchange round by round."""
    steps = time_on_network(plan, network).steps
    bounds = [bound_wires(step.kind, step.operand, step.result, network) for step in steps]
    return sum(step.seconds or 0.0 if bound is None else bound for step, bound in zip(steps, bounds, strict=True))


def sum_wire_seconds(plan: Plan, wire: float) -> float:
    """The seconds that a plan's steps say; where one says nothing, what it receives comes over a wire of so many bytes
    a second."""
    each = (step.received_bytes / wire if step.seconds is None else step.seconds for step in plan.steps)
    return sum(each)


@lru_cache(maxsize=4096)
def bound_wires(kind: str, operand: Layout, result: Layout, network: Network) -> float | None:
    """The seconds of the wires in which a program of XLA could run a step, one collective after another; None where
    `cuts` has no bound of its kind or of the network.

    >>> from reshard.types import Mesh
    >>> ends = [Layout.parse(text, Mesh(x=2, y=2, z=2)) for text in ("u8[{x}900, {y}{z}900]", "u8[{z}900, {x}{y}900]")]
    >>> bound_wires("exchange", *ends, Network.preset("tpu-v5p"))
    4.5e-06
    """
    mesh, r = operand.mesh, refine(operand, result)
    if r is None or not r.exact or not one_set(mesh, result.mesh):
        return None
    wires, at = network.links(mesh), np.arange(mesh.size)
    if kind in ("exchange", "permute"):
        even: Any = EvenRounds(r, spread=mesh.size <= SPREAD)
        turns = list(itertools.product(*(range(digit.radix) for digit, _ in even.shares)))
        # Each round takes 30 ms on 4,096 devices: of many, some at equal distances stand for all.
        sample = turns[:: -(-len(turns) * mesh.size // BOUNDED)]
        rounds = [bound_round(wires, mesh, even.sender(at, turn)) for turn in sample]
        message = operand.tile_bytes if kind == "permute" else operand.nbytes(r.common)
        each = message * len(turns) / len(sample)
        return None if None in rounds else each * sum(seconds or 0.0 for seconds in rounds)
    if kind in ("all_gather", "all_to_all"):
        factors = [(digit.src or 0, digit.radix) for digit in r.gathered]
        groups = np.array(groups_along(Mesh(mesh.axes), factors))
        bound = bound_groups(wires, mesh, groups, swaps=kind == "all_to_all")
        blocks = groups.shape[1] if kind == "all_to_all" else 1
        return None if bound is None else bound * operand.tile_bytes / blocks
    return None


def list_passes(plan: Plan) -> list[Pass]:
    """The passes over memory of a plan as it is spelled."""
    program, at, passes = lower_plan(plan), 0, list[Pass]()
    for loop in group_steps(plan.steps):
        if loop[0].mode.parts > 1:
            passes += _pass_parts(loop, program, at)
        elif loop[0].kind != "permute" or loop[0] is plan.steps[-1]:
            passes += _pass_at_once(loop[0], program, at)  # What a permute brings is copied only if it is the result.
        at += len(loop)
    return passes


def _pass_parts(loop: Sequence[Step], program: Program, at: int) -> Iterator[Pass]:
    """The passes of steps that share a loop, which begin at instruction `at`."""
    parts, instructions = loop[0].mode.parts, program.instructions[at : at + len(loop)]
    unrolled = are_unrolled([each for each in instructions if isinstance(each, InParts)])
    for number, step in enumerate(loop):
        instruction, last = instructions[number], number == len(loop) - 1
        assert isinstance(instruction, InParts)
        sent, received, turns = _padded(step.operand), _padded(step.result), _turns(step)
        if step.kind == "slice":
            yield Pass(received, "load", parts)
            continue
        form = choose_part_form(instruction, program.tile_shapes[at + number], program.dtype)
        if number == 0 and unrolled:
            yield Pass(sent / parts, "load")  # The other parts are cut out beside the copies.
        elif number == 0:
            yield Pass(sent, "load", parts)
        cut = form.cut and len(loop) == 1
        if turns and not form.turns:
            yield Pass(sent, "turn_part", parts)  # The minor dim of the message is that of the result.
        elif (form.packed or form.cut) and not cut:
            yield Pass(sent, "copy", parts)
        if isinstance(instruction.each, Exchange):
            yield Pass(sent, "copy", step.launches)
            yield Pass(received, "copy", step.launches)
        if form.turns and isinstance(instruction.each, AllToAll):
            yield Pass(received, "load", parts * (form.kernels - 1))
        if form.turns and last:
            yield Pass(received, "turn_part", parts)
        if form.joined:
            yield Pass(received, "copy", parts)
        if last:
            yield Pass(received, "copy", parts * (1 if form.turns else form.kernels))


def _pass_at_once(step: Step, program: Program, at: int) -> Iterator[Pass]:
    """The passes of a step at once, which is instruction `at`."""
    sent, received, each = _padded(step.operand), _padded(step.result), program.instructions[at]
    if isinstance(each, AllToAll):
        if not lie_in_turn(each.send, choose_memory_order(each.send.tile, program.dtype)):
            yield Pass(sent, "copy")
        joins = find_minor_dim(step.result) in {each.receive.dims[axis] for axis in each.receive.blocks}
        yield Pass(received, "join" if joins else "copy")
        if _turns(step) and not joins:
            yield Pass(max(sent, received), "turn")
    elif isinstance(each, Exchange) and step.launches:
        # Messages are cut out and written one by one, and what stays is copied.
        # A loop over pieces reads their places from tables, each in a kernel.
        moved, r = step.received_bytes, refine(step.operand, step.result)
        box = () if r is None or not all(r.box) else r.box
        padding = measure_padding(box, program.dtype)
        kernels = step.launches * (4 if step.mode.chunk is not None else 1)
        yield Pass(*((moved, "turn") if _turns(step) else (moved * padding, "load")), kernels)
        if _turns(step):
            yield Pass(moved, "turn_part", step.launches)  # Narrow slices are rearranged before they go.
        yield Pass(max(0.0, received - moved) + moved * padding, "copy", step.launches + 1)
    else:
        yield Pass(received, "turn" if _turns(step) and step.launches else "copy")


def _padded(layout: Layout) -> int:
    """The bytes of a tile in a TPU's memory."""
    return count_padded_bytes(layout.tile_shape, layout.dtype)


def find_minor_dim(layout: Layout) -> int:
    """The dim of a tile that a TPU has minor in memory."""
    return choose_memory_order(layout.tile_shape, layout.dtype)[-1]


def _turns(step: Step) -> bool:
    """Whether another dim becomes minor in memory."""
    return find_minor_dim(step.operand) != find_minor_dim(step.result)
