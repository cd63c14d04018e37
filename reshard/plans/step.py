"""A step: one collective from an operand to a result, checked by the typing rule of its kind as it is built.

The constructor of `Step` calls the rule, so an unchecked step cannot exist. A `StepSpec` is one before it is checked.

What is live while steps run, on each kind of device (those that belong to the same meshes), is counted here, too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from reshard.errors import PlanError, StepError, quoted
from reshard.geometry.figures import most_sent
from reshard.geometry.relay import relay_figures
from reshard.geometry.remesh import disjoint
from reshard.plans.rules.collectives import RULES, VIEW_RULES, check_step
from reshard.plans.rules.step_mode import PLAIN, Cost, StepMode, wire_layout
from reshard.plans.rules.view_steps import keeps_memory
from reshard.types.index_set import IndexSet
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh as Mesh
from reshard.types.view import View
from reshard.types.whole import MOST, checked_flag, whole


@dataclass(frozen=True)
class Step:
    """One collective from `operand` to `result`, derived by the rule of its `kind`.

    `mode` splits the step into parts, cuts the messages of an exchange, or runs it in place. `retained_bytes` are those
    of a source that is kept beside the operand. Raises `StepError` if the rule refuses.

    >>> mesh = Mesh(x=4)
    >>> step = Step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    >>> step.received_bytes, step.launches, step.live_bytes
    (48, 1, 80)
    """

    kind: str
    operand: Layout
    result: Layout
    mode: StepMode = PLAIN
    retained_bytes: int = 0
    seconds: float | None = None
    cost: Cost = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, layout in (("operand", self.operand), ("result", self.result)):
            if not isinstance(layout, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise StepError(f"the {what} {quoted(layout)} of a step is not a Layout; read it with Layout.parse")
        if not isinstance(self.kind, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            steps = ", ".join((*RULES, *VIEW_RULES))
            raise StepError(f"the kind {quoted(self.kind)} of a step is not text; the steps are {steps}")
        object.__setattr__(self, "mode", _checked_mode(self.mode))
        # Elements are counted in 64 bits; their bytes may be more.
        if whole(self.retained_bytes, most=MOST**2) is None:
            raise StepError(f"retained_bytes {quoted(self.retained_bytes)} of a step: give bytes, an int of at least 0")
        checked_seconds(self.seconds)
        object.__setattr__(self, "cost", check_step(self.kind, self.operand, self.result, self.mode))

    @property
    def received_bytes(self) -> int:
        """Bytes that the busiest device receives in this step."""
        return self.cost.received

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest device sends in this step; a reduction's are those that it receives."""
        if self.kind != "exchange":
            return self.received_bytes
        mode = self.mode
        ends = self.operand, self.result, mode.view
        sent = most_sent(*ends, relayed=mode.relay, holding=mode.holding, gathers=mode.gathers)
        return self.wire.nbytes(sent)

    @property
    def wire(self) -> Layout:
        """The operand, with the dtype in which its elements travel."""
        return wire_layout(self.operand, self.result)

    @property
    def endpoint_bytes(self) -> int:
        """What the busiest device sends or receives, whichever is more; of a relay, the sum of both turns."""
        if not self.mode.relay:
            return max(self.received_bytes, self.sent_bytes)
        ends = self.operand, self.result, self.mode.view, self.mode.holding
        turns = relay_figures(*ends, gathers=self.mode.gathers).turns
        return sum(self.operand.nbytes(max(turn.received, turn.sent)) for turn in turns)

    @property
    def spec(self) -> StepSpec:
        """The step before it was checked."""
        return StepSpec(self.kind, self.result, self.mode)

    @property
    def judgement(self) -> tuple[str, Layout, Layout, StepMode]:
        """What the functions of `plans.rules` are given: kind, operand, result and mode."""
        return self.kind, self.operand, self.result, self.mode

    @property
    def launches(self) -> int:
        """Collective calls: one, or the rounds of an exchange."""
        return self.cost.launches

    @property
    def held_bytes(self) -> int:
        """What a device of the result holds of it in other tiles, which stay beside these."""
        layout = self.result if self.mode.holding is None else self.mode.holding.layout
        return 0 if layout == self.result or disjoint(layout.mesh, self.result.mesh) else layout.tile_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes on one device while the step runs: source if kept, operand, result and scratch.

        This is the most that `Batch.footprint` counts on any kind of device, of the step alone.
        """
        before, after, held = self.operand.tile_bytes, self.result.tile_bytes, self.held_bytes
        if disjoint(self.operand.mesh, self.result.mesh):  # No device has both operand and result.
            return max(self.retained_bytes + before, held + after) + self.cost.scratch
        return self.retained_bytes + held + self.join_tiles(before, after) + self.cost.scratch

    def join_tiles(self, before: int, after: int) -> int:
        """The bytes of operand and result on a device that has so many of each: together, if one takes the place of
        the other."""
        if type(before) is not int or type(after) is not int:
            raise StepError(f"bytes {quoted(before)} and {quoted(after)}: give whole numbers")
        shared = self.mode.in_place or keeps_memory(*self.judgement)
        return max(before, after) if shared else before + after


class StepSpec(NamedTuple):
    """A step before it is checked: its kind, its result, and the mode it runs in."""

    kind: str
    result: Layout
    mode: StepMode = PLAIN


def checked_seconds(value: object) -> float | None:
    """Predicted seconds, None without a network; `PlanError` for what is neither."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return value
    raise PlanError(f"seconds {quoted(value)}: give a number of at least 0, or None (null in JSON) without a network")


def _checked_mode(mode: object) -> StepMode:
    """Returns the mode with ints of Python's own; refuses one whose chunk or parts are not ints of at least 1."""
    if not isinstance(mode, StepMode):
        raise StepError(f"the mode {quoted(mode)} of a step is not a StepMode; give StepMode(chunk, in_place, parts)")
    if whole(mode.parts, 1) is None or not (mode.chunk is None or whole(mode.chunk, 1)):
        raise StepError(f"{quoted(mode)}: chunk and parts of a step are ints of at least 1, chunk None for no limit")
    in_place, relay, overlap, fresh, gathers = (
        checked_flag(getattr(mode, name), name, StepError)
        for name in ("in_place", "relay", "overlap", "fresh", "gathers")
    )
    if mode.view is not None and not isinstance(mode.view, View):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StepError(f"{quoted(mode)}: view is a View, or None")
    held = mode.holding
    if held is not None and not (isinstance(held.layout, Layout) and isinstance(held.stale, IndexSet)):  # pyright: ignore
        raise StepError(f"{quoted(mode)}: holding is a Holding of a Layout and an IndexSet, or None")
    chunk = None if mode.chunk is None else whole(mode.chunk)
    return StepMode(chunk, in_place, whole(mode.parts) or 1, relay, mode.view, overlap, held, fresh, gathers)


# What is live on each device while the batches of a plan run one after another.
#
#     w: f32[{x}4, 8] -> f32[16, 8]      source 128 B, target 512 B      b: f32[{x}2] -> f32[8]      8 B and 32 B
#
#     at first           w's and b's sources                             136 B
#     batch 1, w         both sources, w's target                        648 B
#     batch 2, b         both sources, both targets                      680 B      with donation 512 + 8 + 32 B
#
# Sources and targets may be on different devices, so the figures are kept for each kind of device: those that belong
# to the same meshes. On one set of devices there is one kind.


Bytes = tuple[int, ...]
"""Bytes on a device of each kind."""


class Footprint(NamedTuple):
    """What a batch needs of a device's memory: its sources at first, the most while it runs, and what it leaves."""

    before: Bytes
    during: Bytes
    after: Bytes


class DeviceKinds:
    """The kinds of devices among some meshes, by the meshes that they belong to.

    >>> trainer, server = Mesh(x=4), Mesh({"y": 4}, device_ids=[2, 3, 4, 5])
    >>> kinds = DeviceKinds([trainer, server])
    >>> kinds.count, kinds.of(trainer), kinds.of(server)
    (3, (1, 1, 0), (0, 1, 1))
    """

    def __init__(self, meshes: Iterable[Mesh]) -> None:
        sets = dict.fromkeys(map(_device_set, meshes))
        # On one set of devices there is one kind, and no device is listed.
        several = sets if len(sets) > 1 else ()
        members = [range(each) if isinstance(each, int) else frozenset(each) for each in several]
        sizes = sorted(each for each in several if isinstance(each, int))
        devices = set[int]().union(*(each for each in several if not isinstance(each, int)))
        # A mesh without ids may be larger than any list: the first device that no list has stands for those up to the
        # next size.
        firsts = (next(at for at in itertools.count(low) if at not in devices) for low in (0, *sizes[:-1]))
        devices |= {at for at in tuple(firsts) if sizes and at < sizes[-1]}
        kinds = dict.fromkeys(tuple(device in held for held in members) for device in sorted(devices))
        self._in = {each: tuple(int(kind[at]) for kind in kinds) or (1,) for at, each in enumerate(sets)}
        self.count = max(1, len(kinds))
        self._tiles: dict[Layout, Bytes] = {}  # Hundreds of arrays have a few layouts.
        self._among: dict[tuple[tuple[int, ...] | int, ...], tuple[DeviceKinds, Sequence[int]]] = {}
        self.known: dict[Any, Any] = {}
        """What plans need, kept by whoever asks for it again and again."""

    def of(self, mesh: Mesh) -> Bytes:
        """For each kind, 1 if its devices belong to a mesh, else 0."""
        return self._in.get(_device_set(mesh)) or (1,)

    def among(self, meshes: Iterable[Mesh]) -> tuple[DeviceKinds, Sequence[int]]:
        """The few kinds that some of the meshes tell apart, and for each kind its number among these.

        Where senders differ from array to array there are hundreds of kinds, of which one array has three.

        >>> meshes = [Mesh({"x": 2}, device_ids=[at, at + 1]) for at in range(0, 6, 2)]
        >>> few, numbers = DeviceKinds(meshes).among(meshes[1:2])
        >>> few.count, numbers, few.of(meshes[1])
        (2, [0, 1, 0], (0, 1))
        """
        sets = tuple(dict.fromkeys(map(_device_set, meshes)))
        if sets not in self._among:
            members = [*zip(*(self._in.get(each) or (1,) for each in sets), strict=True)]
            kinds = {kind: at for at, kind in enumerate(dict.fromkeys(members))}
            few = DeviceKinds(())
            few._in = {each: tuple(kind[at] for kind in kinds) for at, each in enumerate(sets)}
            few.count = len(kinds)
            self._among[sets] = few, [kinds[member] for member in members]
        return self._among[sets]

    def tile(self, layout: Layout) -> Bytes:
        """The bytes of a layout's tile on the devices of each kind."""
        if layout not in self._tiles:
            self._tiles[layout] = tuple(layout.tile_bytes * held for held in self.of(layout.mesh))
        return self._tiles[layout]

    def total(self, each: Iterable[Bytes]) -> Bytes:
        """The sum, kind by kind."""
        return tuple(map(sum, zip((0,) * self.count, *each, strict=True)))


@lru_cache(maxsize=1024)
def _device_set(mesh: Mesh) -> tuple[int, ...] | int:
    """What meshes with the same devices have in common."""
    ids = mesh.device_ids
    if ids is None or set(ids) == set(range(mesh.size)):
        return mesh.size
    return tuple(sorted(ids))


def find_peaks(footprints: Sequence[Footprint], live: Bytes | None = None) -> Bytes:
    """The most bytes live on a device of each kind while batches with these footprints run in this order.

    `live` is what is there at first, unless that is what the batches start from.

    >>> find_peaks([Footprint((8,), (40,), (40,)), Footprint((128,), (640,), (640,))])
    (680,)
    """
    now = list(live or map(sum, zip(*(footprint.before for footprint in footprints), strict=True))) or [0]
    most = list(now)
    for before, during, after in footprints:
        for kind in range(len(now)):
            now[kind] -= before[kind]
            most[kind] = max(most[kind], now[kind] + during[kind])
            now[kind] += after[kind]
    return tuple(most)
