"""Fragments: plans compiled for the devices and memory layouts of a program, captured before they are scheduled.

A fragment is a module with one parameter, the tile before, and a root, the tile after. XLA compiles it as it compiles
any program, and hands it to our pass at the stage at which it hands over the program itself. So a fragment is spelled
as this compiler on this platform spells it, and is never written by hand.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as JaxLayout
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard import hlo
from reshard.doctor.checks.proofs import Proofs
from reshard.doctor.infer_layouts import Pick
from reshard.doctor.proposals import ProgramCost
from reshard.errors import SpliceError
from reshard.hlo import Array
from reshard.jax.xla_pass.compiling_thread import CompilingThread
from reshard.jax.xla_pass.program_peaks import peak_bytes
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.types import dtypes
from reshard.types.mesh import Mesh
from reshard.types.plan import Plan

_TILE = re.compile(r"\(([\d,]+)\)")
_ORDER = re.compile(r"^([\d,]*)(?::T((?:\([\d,]+\))+))?$")
_QUICKER = {"cpu": {"xla_backend_optimization_level": 0}}
"""Options that make worse machine code in half the time, of a fragment that never runs: its module is the same."""
_capturing = CompilingThread[list[bytes]]("reshard-fragment")


@dataclass(frozen=True)
class FragmentKey:
    """What a fragment is compiled for: the plan, the tiles before and after, and how the source's digits lie.

    With a `pick`, the plan moves a part of the tile, and the result is one device's.
    """

    plan: Plan
    before: Array
    after: Array
    places: tuple[tuple[int, int], ...]
    pick: Pick | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of its layouts."""
        return self.plan.source.mesh

    @property
    def afters(self) -> tuple[Array, ...]:
        """The arrays that it yields."""
        return (self.after,)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives."""
        return self.plan.received_bytes

    def __str__(self) -> str:
        return f"{self.plan.source} -> {self.plan.target}"

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
        """From the tile before to those afterwards, for code inside a `shard_map` over all axes.

        The conversions that the program has on the way come first or last, so that the narrowest dtype is moved.
        """
        run = tile_function(lower_plan(self.plan), axes)
        moved = dtypes.canonical(self.plan.source.dtype)
        box = (...,) if self.pick is None else tuple(slice(first, last + 1) for first, last in self.pick.box)
        at = (...,) if self.pick is None else self.pick.at

        def move(tile: jax.Array) -> tuple[jax.Array, ...]:
            tile = in_places(tile[box].astype(moved), self.places).reshape(self.plan.source.tile_shape)
            return (run(tile)[at].reshape(self.after.dims).astype(dtypes.canonical(self.after.dtype)),)

        return move


class Key(Hashable, Protocol):
    """What a fragment is compiled for: the tile that it takes, those that it yields, and the function between them."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of its layouts."""
        ...

    @property
    def before(self) -> Array:
        """The array that it takes."""
        ...

    @property
    def afters(self) -> tuple[Array, ...]:
        """The arrays that it yields."""
        ...

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
        """From the tile before to those afterwards, for code inside a `shard_map` over all axes."""
        ...


class Fragment(NamedTuple):
    """A captured fragment: its module, and what it costs as it is compiled.

    `peak_bytes` is what a device holds at its peak, both tiles included, `received_bytes` what it receives in how many
    `launches` of collectives.
    """

    module: bytes
    peak_bytes: int
    received_bytes: int = 0
    launches: int = 0


class Fragments:
    """The fragments compiled so far for one set of devices, in the order of the program's device assignment.

    `program_peaks` are those of `ProgramPeaks`, and `proofs` what was proved of the chains that they replaced.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = tuple(devices)
        self._known: dict[Key, Fragment] = {}
        self.program_peaks: dict[tuple[bytes, bytes], ProgramCost] = {}
        self.proofs = Proofs()

    @property
    def platform(self) -> str:
        """The platform of the devices: `cpu`, `tpu`, `gpu` ..."""
        return self.devices[0].platform

    def get(self, key: Key) -> Fragment:
        """The fragment of a plan; raises `SpliceError` where the compiler makes none."""
        if key not in self._known:
            self._known[key] = self._compile(key)
        return self._known[key]

    def _compile(self, key: Key) -> Fragment:
        captured: list[bytes] = []
        try:
            peak, received, launches = _capturing.run(captured, lambda: self._costs(key))
        except Exception as error:  # XLA's errors have no class of their own; the chain stays as it is.
            reason = str(error).partition("\n")[0]
            raise SpliceError(f"{key}: it does not compile here ({reason})") from error
        if len(captured) != 1:
            raise SpliceError(f"{key}: it does not compile here ({len(captured)} modules were captured)")
        return Fragment(captured[0], peak, received, launches)

    def _costs(self, key: Key) -> tuple[int, int, int]:
        """The peak of a fragment as it is compiled, the bytes that a device receives, and the launches."""
        with jax.enable_x64(True):
            compiled = _lowered(key, self.devices).compile(_QUICKER.get(self.platform))
        traffic = hlo.traffic(hlo.parse(compiled.as_text()))
        return peak_bytes(compiled.memory_analysis()), traffic.received_bytes, traffic.launches


def is_capturing() -> bool:
    """Whether this thread is compiling a fragment."""
    return _capturing.mark is not None


def capture(module: bytes) -> bool:
    """Whether this thread is compiling a fragment; keeps the module if so."""
    into = _capturing.mark
    if into is None:
        return False
    into.append(bytes(module))
    return True


def _lowered(key: Key, devices: Sequence[Any]) -> Any:
    """The fragment's program. One with several results yields a constant as well.

    So its root is always a tuple of instructions, and never one instruction that yields them all.
    """
    axes = {f"axis{at}": axis for at, axis in enumerate(key.mesh.axes.values())}
    mesh = JaxMesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    spec = PartitionSpec(tuple(axes))
    function, afters = key.function(axes), key.afters

    def moved(tile: jax.Array) -> Any:
        tiles = function(tile)
        return (*tiles, jax.numpy.zeros(1, bool)) if len(afters) > 1 else next(iter(tiles))

    sharding = NamedSharding(mesh, spec)
    shape = tuple(len(devices) * size if dim == 0 else size for dim, size in enumerate(key.before.dims))
    formats = [Format(_layout_of(one), sharding) for one in afters]
    jitted = jax.jit(
        jax.shard_map(moved, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        in_shardings=Format(_layout_of(key.before), sharding),
        out_shardings=(*formats, sharding) if len(formats) > 1 else formats[0],
    )
    return jitted.lower(jax.ShapeDtypeStruct(shape, dtypes.canonical(key.before.dtype), sharding=sharding))


def in_places(tile: jax.Array, places: Sequence[tuple[int, int]]) -> jax.Array:
    """A tile as its digits, given as radices and strides in the tile; a dim for each, in the order that is given."""
    by_place = sorted(range(len(places)), key=lambda at: -places[at][1])
    order = [by_place.index(at) for at in range(len(places))]
    return tile.reshape([places[at][0] for at in by_place]).transpose(order)


def _layout_of(array: Array) -> JaxLayout:
    """The memory layout of an array in HLO text, as jax writes it."""
    text = _ORDER.match(array.layout)
    if text is None:
        raise SpliceError(f"the memory layout {array.layout} is not known")
    minor_to_major = [int(dim) for dim in text[1].split(",") if dim]
    tiles = [tuple(int(size) for size in tile.split(",")) for tile in _TILE.findall(text[2] or "")]
    return JaxLayout(tuple(reversed(minor_to_major)), tuple(tiles) or None)
