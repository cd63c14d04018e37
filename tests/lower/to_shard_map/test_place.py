"""Groups as `jax.lax` takes them, and tables looked up by the device's position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from reshard.lower.to_shard_map.place import MeshPlace


def test_groups_along_whole_axes_are_named():
    """XLA then keeps the axes, instead of lists."""
    place = MeshPlace(range(8), {"x": 4, "y": 2})
    assert place.group(((0, 2, 4, 6), (1, 3, 5, 7))) == {"axis_name": ("x",)}
    assert place.group(((0, 1), (2, 3), (4, 5), (6, 7))) == {"axis_name": ("y",)}
    assert place.group((tuple(range(8)),)) == {"axis_name": ("x", "y")}
    assert place.group(((0, 2, 4, 6, 1, 3, 5, 7),)) == {"axis_name": ("y", "x")}


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 4), (1, 5), (2, 6), (3, 7)),  # the major half of x
        ((0, 2), (1, 3), (4, 6), (5, 7)),  # the minor half
        ((0, 4, 1, 5), (2, 6, 3, 7)),
        ((0, 2, 4, 6), (1, 3, 7, 5)),  # one group in another order
    ],
)
def test_groups_of_parts_of_axes_are_listed(groups: tuple[tuple[int, ...], ...]):
    place = MeshPlace(range(8), {"x": 4, "y": 2})
    assert place.group(groups) == {"axis_name": ("x", "y"), "axis_index_groups": groups}


def test_axes_of_one_device_are_left_out():
    place = MeshPlace(range(4), {"x": 4, "one": 1})
    assert place.group(((0, 1, 2, 3),)) == {"axis_name": ("x",)}


def on_each_device(entry) -> list[int]:
    """What a function of the place returns on each of eight devices, by position."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def tile() -> jax.Array:
        return jnp.asarray(entry(MeshPlace(range(8), {"x": 4, "y": 2}))).reshape(1)

    mapped = jax.shard_map(tile, mesh=mesh, in_specs=(), out_specs=P(("x", "y")), check_vma=False)
    return np.asarray(jax.jit(mapped)()).tolist()


def test_tables_are_looked_up_by_position():
    assert on_each_device(lambda place: place.here) == list(range(8))
    assert on_each_device(lambda place: place.look_up([3, 1, 4, 1, 5, 9, 2, 6])) == [3, 1, 4, 1, 5, 9, 2, 6]
    turns = [[0] * 8, list(range(10, 18))]
    assert on_each_device(lambda place: place.look_up(np.array(turns), jnp.asarray(1))) == turns[1]
    assert on_each_device(lambda place: place.by_device({d: 7 - d for d in range(8)})) == list(range(7, -1, -1))
    assert on_each_device(lambda place: place.flag([2, 5]).astype(int)) == [0, 0, 1, 0, 0, 1, 0, 0]
    assert on_each_device(lambda place: place.anew().here) == list(range(8))


def test_a_table_of_equal_entries_is_a_constant():
    """Outside of any `shard_map`: the position is not needed."""
    assert int(MeshPlace(range(8), {"x": 8}).look_up([4] * 8)) == 4


def test_a_permute_sends_whole_arrays():
    pairs = [(0, 1), (1, 2), (2, 0)]
    assert on_each_device(lambda place: place.permute(place.here + 10, pairs)) == [12, 10, 11, 0, 0, 0, 0, 0]
