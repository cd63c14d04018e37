"""Shifts that are read off elements, and what devices exchange for them, done by hand in numpy."""

from itertools import product

import numpy as np
import pytest

from reshard.doctor.dataflow.index_maps import UNKNOWN_FILL
from reshard.doctor.dataflow.trace import Origins
from reshard.doctor.shifts import Shift, ShiftCell, infer_shift, plan_exchange, unite_boxes
from reshard.hlo import Array


class Tiles:
    """A tracer of one tile of which each element's origin is given: (devices, *dims) of numbers of elements.

    Padding with zeros is -1, and -2 is padding with an unknown number.
    """

    def __init__(self, origins, dims):
        self.origins, self.dims = origins, dims
        self.devices = origins.shape[0]
        self.tiles = {}

    def __call__(self, value, points):
        self.tiles[7] = Array("f32", self.dims)
        number = self.origins[(points.device, *points.indices)]
        size = int(np.prod(self.dims))
        place = np.where(number == -1, 0, np.where(number == -2, UNKNOWN_FILL, number % size))
        return Origins(np.where(number < 0, -1, 7), number // size, place)


class Result:
    """A value that has nothing but an array."""

    def __init__(self, dims):
        self.array = Array("f32", dims)


def shift_of(array, dims):
    """The shift that results in these numbers of elements, tile by tile."""
    return infer_shift(Tiles(array, dims), Result(array.shape[1:]))


def box(start, sizes):
    return tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))


def run(shifts, tiles):
    """The exchange of these shifts, and their results: launch by launch, each device cutting from what it has."""
    exchange = plan_exchange(tuple(shifts), tiles.shape[1:])
    devices, received = tiles.shape[0], {}
    for at, launch in enumerate(exchange.launches):
        senders = [one for one in launch.senders if one >= 0]
        assert len(set(senders)) == len(senders)
        for number, parcel in enumerate(launch.parcels):
            for device, (home, start) in enumerate(zip(parcel.homes, parcel.starts, strict=True)):
                if home < 0:
                    continue
                sender, held, first = launch.senders[device], None, start
                if parcel.passed_on is None:
                    assert sender == home
                    held = tiles[sender]
                else:
                    by, which = parcel.passed_on
                    assert by < at
                    held = received[sender, by, which]
                    theirs = exchange.launches[by].parcels[which].starts[sender]
                    first = [one - low for one, low in zip(start, theirs, strict=True)]
                received[device, at, number] = held[box(first, parcel.sizes)]
    results = []
    for shift in exchange.shifts:
        result = np.full((devices, *(cuts[-1] for cuts in shift.cuts)), -1)
        for at, cell in zip(shift.boxes(), shift.cells, strict=True):
            spans = tuple(slice(*one) for one in at)
            for device, (home, start) in enumerate(zip(cell.homes, cell.starts, strict=True)):
                if home == device:
                    result[(device, *spans)] = tiles[device][box(start, cell.sizes)]
                elif home >= 0:
                    by, which = exchange.find(device, home, cell.box(device))
                    theirs = exchange.launches[by].parcels[which].starts[device]
                    first = [one - low for one, low in zip(start, theirs, strict=True)]
                    result[(device, *spans)] = received[device, by, which][box(first, cell.sizes)]
        results.append(result)
    return exchange, results


def needed(tiles, *results):
    """The most elements of others that a device needs, each once."""
    size = tiles[0].size
    each = ({int(one) for result in results for one in result[at].flat} for at in range(tiles.shape[0]))
    return max(sum(one >= 0 and one // size != at for one in own) for at, own in enumerate(each))


def check(tiles, results, launches, received=None):
    shifts = [shift_of(one, tiles.shape[1:]) for one in results]
    assert None not in shifts
    exchange, made = run(shifts, tiles)
    for one, other in zip(made, results, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(exchange.launches) == launches
    assert exchange.received_elements == (needed(tiles, *results) if received is None else received)


@pytest.mark.parametrize("by", [1, -1, 2, 3, -5, 7])
@pytest.mark.parametrize(("devices", "rows", "columns"), [(4, 3, 2), (5, 2, 3), (2, 7, 1)])
def test_rolls(devices, rows, columns, by):
    tiles = np.arange(devices * rows * columns).reshape(devices, rows, columns)
    rolled = np.roll(tiles.reshape(-1, columns), by, 0).reshape(tiles.shape)
    others = {int(one) // tiles[0].size for one in rolled[0].flat} - {0}
    check(tiles, [rolled], len(others))


def grid(mesh, tile):
    """The tiles of an array of numbers, split over a mesh with an axis for each dim; a number is device and place."""
    tiles = np.arange(np.prod(mesh) * np.prod(tile)).reshape(*mesh, *tile)
    order = [axis for dim in range(len(mesh)) for axis in (dim, len(mesh) + dim)]
    return tiles.reshape(-1, *tile), tiles.transpose(order).reshape([a * b for a, b in zip(mesh, tile, strict=True)])


def split(array, mesh):
    """The tiles of an array that is split over a mesh."""
    tile = [size // many for size, many in zip(array.shape, mesh, strict=True)]
    sizes = [size for pair in zip(mesh, tile, strict=True) for size in pair]
    dims = len(mesh)
    return array.reshape(sizes).transpose([*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]).reshape(-1, *tile)


@pytest.mark.parametrize(("mesh", "launches"), [((3, 4), 4), ((2, 4), 3), ((3, 3, 3), 6), ((1, 5), 2)])
@pytest.mark.parametrize("width", [1, 2])
def test_all_neighbours_are_served_by_a_launch_each(mesh, launches, width):
    """Rolls by all combinations: the corners come with the edges, and no element comes twice."""
    tiles, whole = grid(mesh, (3, 4, 5)[: len(mesh)])
    by = product((-width, 0, 1), repeat=len(mesh))
    rolled = [split(np.roll(whole, one, range(len(mesh))), mesh) for one in by]
    check(tiles, rolled, launches)


def test_what_lies_beyond_the_edges_is_padding():
    tiles, whole = grid((2, 3), (4, 4))
    padded = np.pad(whole, 1, constant_values=-1)
    parts = [split(padded[1 + y : 9 + y, 1 + x : 13 + x], (2, 3)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    check(tiles, parts, 3)  # up and down are the same neighbour


def test_a_device_at_an_uneven_end_sends_from_another_place():
    """Ten rows of four devices, three on each but the last: its last row is the first, and all else is padding."""
    rows = np.arange(12).reshape(4, 3)
    rolled = np.append(np.roll(rows.reshape(-1)[:10], 1), [-1, -1]).reshape(4, 3)
    check(rows, [rolled], 1, received=1)


def test_a_box_that_several_devices_take_from_one():
    """A permute has one target for each source: the second one is a permute of its own."""
    check(np.arange(6).reshape(3, 2), [np.array([[0, 1], [0, 1], [0, 1]])], 2, received=4)


def test_boxes_that_share_only_a_part_arrive_once():
    tiles, whole = grid((4, 1), (4, 6))
    tall, wide = (np.roll(whole, by, 0)[:, keep] for by, keep in ((3, slice(0, 2)), (1, slice(0, 6))))
    check(tiles, [tall.reshape(4, 4, 2), wide.reshape(4, 4, 6)], 1)


def test_what_is_padding_of_an_unknown_number_or_too_fine_is_none():
    assert shift_of(np.array([[0, -2], [1, -2]]), (2,)) is None
    assert shift_of(np.random.default_rng(0).permutation(256).reshape(2, 128), (128,)) is None


@pytest.mark.parametrize("seed", range(4))
def test_united_boxes_have_each_index_once(seed):
    random = np.random.default_rng(seed)
    boxes = [tuple((int(a), int(a + b)) for a, b in random.integers(1, 5, (3, 2))) for _ in range(6)]
    count = np.zeros((10, 10, 10), int)
    for one in unite_boxes(boxes):
        count[tuple(slice(*span) for span in one)] += 1
    asked = np.zeros(count.shape, bool)
    for one in boxes:
        asked[tuple(slice(*span) for span in one)] = True
    np.testing.assert_array_equal(count, asked)


def test_finer_cuts_change_nothing():
    cell = ShiftCell((4,), (1, 0), ((0,), (2,)))
    fine = Shift(((0, 4),), (cell,)).refine([{1, 3}])
    assert fine.cuts == ((0, 1, 3, 4),)
    assert [one.starts for one in fine.cells] == [((0,), (2,)), ((1,), (3,)), ((3,), (5,))]
