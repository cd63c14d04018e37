"""What every exchange must do: in a round nobody sends or receives twice, and each element is written once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import prod

from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Transfer
from reshard.lower.program import Exchange, Instruction
from reshard.plans.plan import Step, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.geometry.brute import offsets

MESH = Mesh(x=4, y=2)


def instruction(kind: str, source: str, target: str, mesh: Mesh = MESH, mode: StepMode | None = None) -> Instruction:
    """The instruction of one step."""
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    donate = mode is not None and mode.in_place
    (lowered,) = lower_plan(chain(before, after, [StepSpec(kind, after, mode or StepMode())], donate)).instructions
    return lowered


def matchings(rounds: tuple[tuple[Transfer, ...], ...]) -> None:
    """No device sends or receives twice in a round, and no round is for nothing."""
    for turn in rounds:
        assert turn
        assert len({t.sender for t in turn}) == len({t.receiver for t in turn}) == len(turn)
        assert any(t.sender != t.receiver for t in turn)


def busiest(rounds: tuple[tuple[Transfer, ...], ...]) -> int:
    """The most messages that one device sends or receives."""
    sent = Counter(t.sender for turn in rounds for t in turn)
    received = Counter(t.receiver for turn in rounds for t in turn)
    return max((*sent.values(), *received.values()), default=0)


def elements(view_digits: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> Iterator[int]:
    """The flat offsets in a tile of a box in its digits."""
    strides = [prod(view_digits[at + 1 :]) for at in range(len(view_digits))]
    for index in product(*(range(start, start + extent) for start, extent in spans)):
        yield sum(i * s for i, s in zip(index, strides, strict=True))


def global_index(layout: Layout, device: int, offset: int) -> tuple[int, ...]:
    """The global index of a flat offset in a tile."""
    index = []
    for dim, extent in zip(reversed(meaning(layout, device)), reversed(layout.tile_shape), strict=True):
        index.append(dim[offset % extent])
        offset //= extent
    return tuple(index[::-1])


def covers(step: Step, exchange: Exchange) -> None:
    """Each true element of each target tile is written once, from a device that holds that very element."""
    written: Counter[tuple[int, int]] = Counter()
    for transfer in (*exchange.local, *(t for turn in exchange.rounds for t in turn)):
        sliced = exchange.slice_transfer(transfer).blocks
        # What a relay passes on is read from a tile of the result.
        sent, held = (exchange.receive, step.result) if transfer.relayed else (exchange.send, step.operand)
        ends = [(elements(sent.digits, b.src), elements(exchange.receive.digits, b.dst)) for b in sliced]
        pairs = [pair for block in transfer.blocks for pair in offsets(block)]
        assert sorted(pair for each in ends for pair in zip(*each, strict=True)) == sorted(pairs)
        for src, dst in pairs:
            written[transfer.receiver, dst] += 1
            source = global_index(held, transfer.sender, src)
            assert source == global_index(step.result, transfer.receiver, dst)
            assert all(i < n for i, n in zip(source, step.operand.shape, strict=True)), "padding is not data"
    for device in step.result.mesh.devices:
        for offset in range(prod(step.result.tile_shape)):
            index = global_index(step.result, device, offset)
            real = all(i < n for i, n in zip(index, step.result.shape, strict=True))
            assert written[device, offset] == real, f"{index} on {device}: {step.operand} -> {step.result}"
