"""Layouts from PyTorch's placements, against torch's own rule: each mesh dim chunks what the ones before left."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest

from reshard.errors import LayoutError, MeshError
from reshard.geometry.detect import read
from reshard.types import Layout, Mesh
from tests.oracle import PADDING, tiles_of
from tests.sampling import for_each


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class _StridedShard:
    dim: int
    split_factor: int


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Partial:
    reduce_op: str = "sum"


@dataclass(frozen=True)
class RaggedShard:
    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __str__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"


@dataclass(frozen=True)
class Owned:
    owner_rank: int


def local(whole: np.ndarray, placements: list, mesh_shape: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """The elements of a device, as torch splits: mesh dim by mesh dim, in chunks of ceil(n / pieces)."""
    for placement, pieces, index in zip(placements, mesh_shape, at, strict=True):
        if isinstance(placement, Shard):
            whole = chunk(whole, pieces, placement.dim)[index]
        elif isinstance(placement, _StridedShard):
            parts = chunk(whole, placement.split_factor, placement.dim)
            whole = np.concatenate([chunk(part, pieces, placement.dim)[index] for part in parts], placement.dim)
        elif isinstance(placement, RaggedShard):
            # A stretch of what is local, flat: as many units as the device has, after those of the devices before.
            unit = whole.size // sum(placement.local_units)
            start = unit * sum(placement.local_units[:index])
            flat = whole.reshape(-1)[start : start + unit * placement.local_units[index]]
            whole = flat.reshape(-1, *whole.shape[1:])
        elif isinstance(placement, Owned):
            whole = whole if index == placement.owner_rank else whole[:0]
    return whole


def chunk(whole: np.ndarray, pieces: int, dim: int) -> list[np.ndarray]:
    step = -(-whole.shape[dim] // pieces)
    starts = [min(step * n, whole.shape[dim]) for n in range(pieces + 1)]
    return [np.take(whole, range(low, high), dim) for low, high in itertools.pairwise(starts)]


def assert_same(placements: list, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    layout = Layout.from_dtensor(placements, mesh_shape, shape, "int32")
    whole = np.arange(np.prod(shape)).reshape(shape)
    for device, at in enumerate(np.ndindex(mesh_shape)):
        tile = tiles_of(layout)[device]
        wanted = local(whole, placements, mesh_shape, at)
        assert np.array_equal(tile[tile != PADDING], wanted.reshape(-1)), f"{placements} on {mesh_shape}: {layout}"


MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)]
KINDS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, 2), _StridedShard(0, 3), _StridedShard(1, 2)]
SHAPES = [(10, 7), (12, 8), (5, 3)]
PLACEMENTS = [
    (list(each), mesh, shape)
    for shape in SHAPES
    for mesh in MESHES
    for each in itertools.product(KINDS, repeat=len(mesh))
]
"""Whatever these placements can say of small arrays on meshes of one to three dims: 1,242 cases."""


@pytest.mark.parametrize("shape", SHAPES)
def test_placements_mean_what_they_do_in_torch(shape: tuple[int, ...]):
    for case in PLACEMENTS:
        if case[2] == shape:
            assert_same(*case)


@for_each(range(40))
def test_units_and_owners_mean_what_they_do_in_flexshard(seed: int):
    choose = random.Random(seed)
    mesh_shape = tuple(choose.choice([1, 2, 3]) for _ in range(choose.randint(1, 3)))
    placements: list = []
    rows = 1
    for size in mesh_shape:
        units = [choose.randint(0, 2) for _ in range(size)]
        units[choose.randrange(size)] += 1
        dims = (0, 1) if not placements and choose.random() < 0.5 else (0,)
        kinds = [Shard(0), _StridedShard(0, 2), Replicate(), Owned(choose.randrange(size))]
        placements.append(choose.choice([RaggedShard(dims, tuple(units)), *kinds]))
        rows *= sum(units) * size
    shape = (rows if choose.random() < 0.7 else 2 * rows, choose.choice([1, 3]), 2)
    assert_same(placements, mesh_shape, shape)


def test_units_as_text():
    for text in ("RaggedShard(dims=(0,), local_units=(1, 2, 1, 0))", str(RaggedShard((0, 1), (1, 2, 1, 0)))):
        assert str(read(f"[{text}]", Mesh(x=4), (8, 3), "f32")) == "f32[{x}(2,4,2,0), 3]"
        assert str(read(f"({text}, Owned(1))", Mesh(x=4, y=2), (8, 3), "f32")) == "f32[{x}{y}(0,2,0,4,0,2,0,0), 3]"


@pytest.mark.parametrize(
    ("placement", "advice"),
    [
        (RaggedShard((0,), (1, 2)), "units of each"),
        (RaggedShard((0,), (0, 0, 0, 0)), "units of each"),
        (RaggedShard((0,), (1, 2, -1, 0)), "ints"),
        (RaggedShard((0,), (1, 2, 0.5, 0)), "ints"),
        (RaggedShard((1,), (1, 2, 1, 0)), "the first ones"),
        (RaggedShard((), (1, 2, 1, 0)), "the first ones"),
        (RaggedShard((0, 1), (1, 2, 2, 0)), "first dims merged"),
        (RaggedShard((0, 1, 2), (1, 2, 1, 0)), "2 dims"),
        (RaggedShard(0, None), "the first ones"),
        (Owned(4), "one of them"),
        (Owned(-1), "ints"),
    ],
)
def test_units_that_are_refused(placement: object, advice: str):
    with pytest.raises(LayoutError, match=advice):
        Layout.from_dtensor([placement], (4,), (8, 3), "f32")
    with pytest.raises(LayoutError, match="merges into dim 0"):
        Layout.from_dtensor([Shard(1), RaggedShard((0, 1), (1, 2))], (3, 2), (9, 3), "f32")


@pytest.mark.parametrize(
    ("placements", "mesh_shape"),
    [
        ([_StridedShard(0, 4), Shard(0)], (2, 4)),
        ([_StridedShard(0, 2), Shard(1), Shard(0)], (3, 2, 2)),
        ([Shard(-3), Replicate()], (2, 4)),
    ],
)
def test_strided_shards(placements: list, mesh_shape: tuple[int, ...]):
    assert_same(placements, mesh_shape, (24, 6, 2))


@pytest.mark.parametrize(
    ("placements", "mesh_shape", "size", "text"),
    [
        ([Shard(0), Shard(0)], (3, 2), 10, "s32[{d0}{d1}~10]"),
        ([Shard(0), Shard(0)], (2, 4), 11, "s32[{d0}{d1}(2,2,2,0,2,2,1,0)]"),
        # Eight pieces, 4 of them before the digit that the first placement holds, each in 2 after it.
        ([_StridedShard(0, 4), Shard(0)], (2, 8), 16, "s32[{d1:(1)4}{d0}{d1:(4)2}]"),
        ([_StridedShard(0, 3), Replicate()], (2, 2), 16, "s32[{d0}(3@0,3@1,3@0,3@1,2@0,2@1)]"),
    ],
)
def test_uneven_parts_are_cut_one_by_one(placements: list, mesh_shape: tuple[int, ...], size: int, text: str):
    assert str(Layout.from_dtensor(placements, mesh_shape, (size,), "int32")) == text
    assert_same(placements, mesh_shape, (size,))


def test_uneven_sizes():
    for size, pieces in ((10, 4), (3, 4), (1, 2), (0, 2), (7, 1)):
        assert_same([Shard(0)], (pieces,), (size, 2))


def test_text_and_objects_are_the_same():
    objects = [_StridedShard(0, 4), Shard(0), Replicate(), Partial("avg")]
    text = ["_S(0, 4)", "S(0)", "R", "P(avg)"]
    layouts = [Layout.from_dtensor(given, (2, 4, 2, 3), (16, 3), "float32") for given in (objects, text)]
    assert layouts[0] == layouts[1]
    assert str(layouts[0]) == "f32[{d1}{d0}2, 3] + mean{d3}"


def test_a_mesh_with_names():
    mesh = Mesh(dp=2, tp=4)
    named = Layout.from_dtensor(["S(0)", "S(1)"], (2, 4), (16, 8), "float32", names=["dp", "tp"])
    assert named == Layout.from_dtensor(["S(0)", "S(1)"], mesh, (16, 8), "float32")
    assert str(named) == "f32[{dp}8, {tp}2]"


@pytest.mark.parametrize(
    ("placements", "shape", "message"),
    [
        (["S(0)"], (16,), "1 placements for a mesh"),
        (["S(1)", "R"], (16,), "the array has 1 dims"),
        (["X", "R"], (16,), "write S(dim)"),
        ([3, "R"], (16,), "is not a placement"),
        (["P(xor)", "R"], (16,), "its reduction is"),
        (["P(sum)", "P(max)"], (16,), "one reduction"),
        (["_S(0, 1000000)", "_S(0, 999999)"], (10**9 + 1,), "smaller split factor"),
    ],
)
def test_refusals(placements: list, shape: tuple[int, ...], message: str):
    with pytest.raises(LayoutError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Layout.from_dtensor(placements, (4, 4), shape, "float32")


def test_refused_names():
    with pytest.raises(LayoutError, match="1 names"):
        Layout.from_dtensor(["R", "R"], (2, 2), (4,), "float32", names=["a"])
    with pytest.raises(MeshError):
        Layout.from_dtensor(["R"], (0,), (4,), "float32")
