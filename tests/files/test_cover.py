"""Pieces that cover a tensor once, judged by numpy: cut at random, and with one box changed."""

from __future__ import annotations

import random

import numpy as np

from reshard.errors import FileError
from reshard.plans.stored import Box, Stored, StoredPiece
from reshard.runtime.on_files.formats.metadata_files import check_cover
from tests.sampling import for_each


def cut_at_random(choose: random.Random, box: Box, cuts: int) -> list[Box]:
    """Boxes that are the box together."""
    boxes = [box]
    for _ in range(cuts):
        at = choose.randrange(len(boxes))
        dim = choose.randrange(len(box))
        low, high = boxes[at][dim]
        middle = choose.randint(low, high)
        halves = (low, middle), (middle, high)
        boxes[at : at + 1] = [(*boxes[at][:dim], half, *boxes[at][dim + 1 :]) for half in halves]
    choose.shuffle(boxes)
    return boxes


@for_each(range(300))
def test_boxes_are_taken_if_and_only_if_they_cover_once(seed: int):
    choose = random.Random(seed)
    shape = tuple(choose.randint(1, 7) for _ in range(choose.randint(1, 3)))
    boxes = cut_at_random(choose, tuple((0, size) for size in shape), choose.randint(0, 12))
    if choose.random() < 0.6:  # A side moves, so that elements are missing, doubled, or outside; or both at once.
        at, dim = choose.randrange(len(boxes)), choose.randrange(len(shape))
        low, high = boxes[at][dim]
        side = (max(0, low + choose.choice((-1, 0, 1))), max(low, high + choose.choice((-1, 0, 1))))
        boxes[at] = (*boxes[at][:dim], side, *boxes[at][dim + 1 :])
    covered = np.zeros([size + 1 for size in shape], int)
    for box in boxes:
        covered[tuple(slice(*side) for side in box)] += 1
    inside = covered[tuple(slice(0, size) for size in shape)]
    right = bool((inside == 1).all()) and covered.sum() == inside.sum()
    stored = Stored("w", "int8", shape, tuple(StoredPiece(box, 0, 0, 1) for box in boxes))
    try:
        check_cover("a", stored)
        taken = True
    except FileError:
        taken = False
    assert taken == right
