"""Orders and padding of arrays in a TPU's memory, as libtpu 0.0.51 chose them for the arguments of programs on v5p."""

from __future__ import annotations

import pytest

from reshard.lower.to_shard_map.tpu_layout import memory_order, padded_elements


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "elements"),
    [
        ((8, 128), "bfloat16", (0, 1), 8 * 128),
        ((128, 8), "bfloat16", (1, 0), 8 * 128),  # full lanes in dim 0: it becomes the minor one
        ((512, 512, 64), "bfloat16", (0, 2, 1), 512 * 512 * 64),
        ((4096, 4096, 12), "bfloat16", (2, 0, 1), 4096 * 4096 * 12),  # not 12 rows of 16
        ((64, 128, 32, 32), "bfloat16", (0, 2, 3, 1), 64 * 128 * 32 * 32),
        ((64, 64, 32, 64), "bfloat16", (0, 1, 2, 3), 64 * 64 * 32 * 128),  # whichever is minor, it has 64 lanes
        ((4096, 4, 4096), "int8", (0, 1, 2), 4 * 4096**2),  # four rows are a tile of their own
        ((4096, 1, 4096), "float32", (0, 1, 2), 4096**2),  # one is, too, but of elements of 32 bits only
        ((4096, 1, 4096), "bfloat16", (1, 0, 2), 4096**2),
        ((4096, 2, 4096), "int8", (1, 0, 2), 2 * 4096**2),
        ((256, 2, 3, 5), "bfloat16", (2, 3, 1, 0), 256 * 2 * 3 * 5),
        ((256, 2, 3, 5), "int8", (1, 3, 2, 0), 256 * 2 * 4 * 5),
        ((3, 5, 7), "float32", (1, 0, 2), 5 * 4 * 128),
        ((20, 1000), "bfloat16", (0, 1), 24 * 1024),
        ((1, 1024), "int8", (0, 1), 4 * 1024),
        ((7,), "float32", (0,), 7),
        ((0, 5), "float32", (0, 1), 0),
    ],
)
def test_the_order_of_least_padding(shape: tuple[int, ...], dtype: str, order: tuple[int, ...], elements: int):
    assert memory_order(shape, dtype) == order
    assert padded_elements([shape[dim] for dim in order], dtype) == elements
