"""Boxes of atoms: runs cut into boxes and merged again hold the indices that they should, at their places."""

import random
from itertools import product
from math import prod

import numpy as np

import reshard as rs
from reshard.geometry.view_boxes import BoxIndex, SideBox, common_box, dim_boxes
from reshard.types.meaning import meaning
from tests.layouts import MESHES, random_layout


def test_the_boxes_of_a_piece_are_its_indices():
    for seed in range(300):
        choose = random.Random(seed)
        sizes = [choose.choice((1, 2, 3, 4, 6)) for _ in range(choose.randint(1, 3))]
        layout = random_layout(choose, choose.choice(MESHES), [prod(sizes)])
        windows = [(start := choose.randrange(size), choose.randint(1, size - start), size) for size in sizes]
        pieces = dim_boxes(layout.dims[0], windows)
        for device in layout.mesh.devices:
            index = meaning(layout, device)[0]
            wanted = {}
            for local, flat in enumerate(index):
                if flat < layout.shape[0]:
                    digits = np.unravel_index(flat, sizes)
                    if all(low <= d < low + count for d, (low, count, _) in zip(digits, windows, strict=True)):
                        wanted[tuple(int(d) - low for d, (low, _, _) in zip(digits, windows, strict=True))] = local
            assert wanted in [elements(boxes) for boxes in pieces], (seed, device)


def elements(boxes: list[SideBox]) -> dict[tuple[int, ...], int]:
    """The place in the tile of every element, by its digits."""
    places: dict[tuple[int, ...], int] = {}
    for box in boxes:
        for at in product(*(range(low, high) for low, high in zip(box.low, box.high, strict=True))):
            assert at not in places
            steps = zip(at, box.low, box.strides, strict=True)
            places[at] = box.place + sum((value - low) * stride for value, low, stride in steps)
    return places


def test_a_block_cyclic_dim_is_one_box():
    layout = rs.Layout.parse("f32[12{x}2]", rs.Mesh(x=4))
    assert [len(boxes) for boxes in dim_boxes(layout.dims[0], [(0, 12, 12), (0, 8, 8)])] == [1, 1, 1, 1]


def test_the_index_gives_every_box_that_overlaps():
    choose = random.Random(0)
    for _ in range(200):
        rank = choose.randint(0, 3)
        boxes = []
        for n in range(choose.randint(0, 12)):
            low = tuple(choose.randrange(10) for _ in range(rank))
            high = tuple(start + choose.randint(1, 10 - start) for start in low)
            boxes.append(((n,), SideBox(low, high, 0, (1,) * rank)))
        index = BoxIndex(boxes, [10] * rank)
        for _, box in boxes:
            near = {pieces for pieces, other in index.candidates(box)}
            assert near >= {pieces for pieces, other in boxes if common_box(other, box) is not None}
