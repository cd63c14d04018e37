"""Random data: tiles of the source, and the check of tiles of the target."""

import itertools
import random

import numpy as np
import pytest

import reshard as rs
from reshard.cli import trial
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.types.meaning import meaning
from tests.layouts import random_pair


def test_random_data_differs_by_seed_and_not_by_run():
    layout = rs.Layout.parse("f32[{x}4]", rs.Mesh(x=4))
    tiles = [trial.Trial(layout, layout, seed).source_tiles()[0] for seed in (1, 1, 2)]
    assert np.array_equal(tiles[0], tiles[1])
    assert not np.array_equal(tiles[0], tiles[2])


DTYPES = ["int8", "uint8", "bool", "float32", "bfloat16", "complex64", "int4", "float8_e5m2", "float8_e8m0fnu"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("partial", [False, True])
def test_source_tiles_are_cut_by_the_meaning(seed, partial):
    source, target = random_pair(random.Random(seed), "float32", partial)
    made = trial.Trial(source, target, seed)
    for device, tile in made.source_tiles().items():
        summand = made.summands[source.mesh.coordinates(source.mesh.position(device), source.partial)]
        for local, element in zip(np.ndindex(tile.shape), itertools.product(*meaning(source, device)), strict=True):
            if all(index < size for index, size in zip(element, source.shape, strict=True)):
                assert tile[local] == summand[element]


@pytest.mark.parametrize("text", ["f32[{x}3/7, 5]", "s8[2{x}2/11]", "bf16[{x}{y}1/5, {z}2/3]"])
def test_each_wrong_element_is_a_fault_and_padding_is_not(text):
    layout = rs.Layout.parse(text, rs.Mesh(x=3, y=2, z=2))
    made = trial.Trial(layout, layout, 0)
    for device in layout.mesh.devices:
        for local, element in enumerate(itertools.product(*meaning(layout, device))):
            tiles = made.source_tiles()
            tiles[device].flat[local] += 1
            true = all(index < size for index, size in zip(element, layout.shape, strict=True))
            assert [(f.device, f.count, f.at) for f in made.faults(tiles)] == [(device, 1, element)] * true


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_are_of_the_dtype_and_finite(name):
    layout = rs.Layout.parse(f"{rs.Layout.from_spec(rs.Mesh(x=2), (8,), name, [[]])}", rs.Mesh(x=2))
    numbers = trial.Trial(layout, layout, 0)._numbers((500,), 1)
    assert numbers.dtype == numpy_dtype(layout.dtype)
    wide = numbers.astype(np.complex128)
    assert np.isfinite(wide).all() and len(set(wide.tolist())) > 1
    if name in ("int8", "int4"):
        assert wide.real.min() < 0 < wide.real.max()


@pytest.mark.parametrize(("name", "reduction"), [("int4", "sum"), ("uint8", "product"), ("float32", "sum")])
def test_several_summands_neither_cancel_nor_overflow(name, reduction):
    mesh = rs.Mesh(x=5)
    source = rs.Layout.parse(f"{rs.Layout.from_spec(mesh, (50,), name, [[]])} + {reduction}{{x}}", mesh)
    made = trial.Trial(source, source, 0)
    wide = np.stack([array.astype(np.float64) for array in made.summands.values()])
    assert len(wide) == 5 and (wide >= 0).all()
    if name == "float32":
        assert np.abs(wide.sum(axis=0) - 1).max() <= 0.5
    else:
        assert wide.max() <= 3
