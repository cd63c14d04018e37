"""What a new array in a store is to be, whatever the format, and what a library has read of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from reshard.plans.stored import Box, Stored

BoxToRead = tuple[Stored, Box, NDArray[Any]]
"""A box of whole chunks of a stored tensor, and the array that is filled with its elements."""


class RequestCounts(NamedTuple):
    """Bytes that a library has read, and its requests."""

    bytes: int
    requests: int


@dataclass(frozen=True)
class NewArray:
    """An array that is made in a store: its dtype and shape, and how it is cut and coded.

    `chunks` are its smallest parts (None: one part, or none at all where a format has no need of them), `shards` the
    parts that share a file, multiples of chunks. `codec` is None, "zstd" or "gzip", as the format has it. What is not
    written is `fill`, as the metadata of zarr say it.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    codec: str | None = None
    fill: Any = None
    attributes: Mapping[str, Any] | None = None
    dimension_names: tuple[str | None, ...] | None = None
