"""Shifts: inferred cells against a roll and a split by hand."""

import numpy as np
import pytest

from reshard.doctor.infer_layouts import Shift, ShiftSource, infer_shift
from reshard.hlo import Array


class Tiles:
    """A tracer of one tile of which each element's origin is given: (devices, *dims) of numbers of elements."""

    def __init__(self, origins, dims):
        self.origins, self.dims = origins, dims
        self.devices = origins.shape[0]
        self.tiles = {}

    def __call__(self, value, points):
        from reshard.doctor.dataflow.trace import Origins

        self.tiles[7] = Array("f32", self.dims)
        number = self.origins[(points.device, *points.indices)]
        size = int(np.prod(self.dims))
        return Origins(np.where(number < 0, -1, 7), number // size, number % size)


class Result:
    """A value that has nothing but an array."""

    def __init__(self, dims):
        self.array = Array("f32", dims)


def shift_of(array, dims):
    """The shift that results in these numbers of elements, tile by tile."""
    return infer_shift(Tiles(array, dims), Result(array.shape[1:]))


def applied(shift, tiles):
    """A shift in numpy, cell by cell: the oracle of what it means."""
    devices = tiles.shape[0]
    result = np.full((devices, *(cuts[-1] for cuts in shift.cuts)), -1)
    boxes = list(np.ndindex(*(len(cuts) - 1 for cuts in shift.cuts)))
    for box, sources in zip(boxes, shift.cells, strict=True):
        at = tuple(slice(cuts[one], cuts[one + 1]) for cuts, one in zip(shift.cuts, box, strict=True))
        for source in sources:
            for target, device in enumerate(source.devices):
                if device >= 0:
                    sizes = (part.stop - part.start for part in at)
                    taken = tuple(slice(s, s + size) for s, size in zip(source.start, sizes, strict=True))
                    result[(target, *at)] = tiles[(device, *taken)]
    return result


@pytest.mark.parametrize("by", [1, -1, 2, 3, -5, 7])
@pytest.mark.parametrize(("devices", "rows", "columns"), [(4, 3, 2), (5, 2, 3), (2, 7, 1)])
def test_rolls(devices, rows, columns, by):
    tiles = np.arange(devices * rows * columns).reshape(devices, rows, columns)
    rolled = np.roll(tiles.reshape(-1, columns), by, 0).reshape(tiles.shape)
    shift = shift_of(rolled, (rows, columns))
    assert shift is not None
    assert np.array_equal(applied(shift, tiles), rolled)
    moved = (rolled // (rows * columns) != np.arange(devices)[:, None, None]).sum(axis=(1, 2)).max()
    assert shift.received_bytes("f32") == 4 * moved


def test_sources_that_differ_by_device():
    """The middle third of an array, which starts elsewhere in each tile: each start is a source of its own."""
    tiles = np.arange(4 * 3).reshape(4, 3)
    result = np.array([[4], [5], [6], [7]])
    shift = shift_of(result, (3,))
    assert shift is not None
    assert np.array_equal(applied(shift, tiles), result)
    assert shift == Shift(
        ((0, 1),),
        ((ShiftSource((1,), (1, -1, -1, 2)), ShiftSource((2,), (-1, 1, -1, -1)), ShiftSource((0,), (-1, -1, 2, -1))),),
    )  # fmt: skip
    assert (shift.launches, shift.received_bytes("f32")) == (1, 4)


def test_what_is_padding_or_too_fine_is_none():
    assert shift_of(np.array([[0, -1], [1, -1]]), (2,)) is None
    assert shift_of(np.random.default_rng(0).permutation(64).reshape(2, 32), (32,)) is None


def test_a_box_that_several_devices_take_from_one():
    """A permute has one target for each source: the second one is a permute of its own."""
    result = np.array([[0, 1], [0, 1], [0, 1]])
    shift = shift_of(result, (2,))
    assert shift is not None
    assert [source.devices for source in shift.cells[0]] == [(0, -1, -1), (-1, 0, -1), (-1, -1, 0)]
    assert [source.is_local for source in shift.cells[0]] == [True, False, False]
