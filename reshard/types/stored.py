"""Stored tensors: arrays whose holders are files, as plain data.

    model.embed_tokens.weight, bf16[32000, 4096], in two files

    elements                       where they lie                 may be cut
    [0:16000, 0:4096]              file 0, byte 8,120 on          raw: C order, any part can be read alone
    [16000:32000, 0:4096]          file 1, byte 5,936 on          coded (zstd): the piece is read whole

A file is one more holder of elements: a piece is a box of the tensor, and where its bytes are. Pieces of one tensor do
not overlap and cover it as tiles of a layout without replicas do; where they form a regular grid
whose last chunks are clipped where a layout pads them, they *are* a layout, on a mesh with one device for each chunk:

    shape (10, 8), chunks (3, 4)     f32[{c0}3/10, {c1}4] on <c0=4, c1=2>

Files are numbers here, and their paths are in `Checkpoint.files`: what plans a load sees neither paths nor ranks, and
so plans the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

from reshard.errors import MissingTensorError, did_you_mean, quoted
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dim."""

NO_FILE = -1
"""The file of a piece that only the driver of its format finds, such as a value of a key-value store."""


class StoredPiece(NamedTuple):
    """A box of a tensor and where its bytes are: `nbytes` of them from byte `offset` of a file on.

    A `raw` piece is its elements as they are, little-endian: any part of it can be read alone. Any other is coded
    (compressed, say) and is read whole, by the driver of its format. `checksum` is that of the stored bytes, as the
    name of an algorithm and its value.

    Elements of a raw piece are in C order unless `strides` says, for each dim, how many elements lie between one and
    the next: those of a transposed tensor, or of a tile with padding. Then `nbytes` is from the first to the last.
    """

    box: Box
    file: int
    offset: int
    nbytes: int
    raw: bool = True
    checksum: tuple[str, int] | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ChunkGrid(Sequence[StoredPiece]):
    """The pieces of a regular grid of chunks, in C order, made when they are asked for.

    All of them are coded, or lie where only their format's driver finds them; `nbytes` is what one chunk takes at most.

    >>> grid = ChunkGrid((1000, 300), (256, 128), 4 * 256 * 128)
    >>> len(grid), grid[11].box
    (12, ((768, 1000), (256, 300)))
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    nbytes: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many chunks there are along each dim."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    @overload
    def __getitem__(self, at: int) -> StoredPiece: ...
    @overload
    def __getitem__(self, at: slice) -> list[StoredPiece]: ...
    def __getitem__(self, at: int | slice) -> StoredPiece | list[StoredPiece]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        box: list[tuple[int, int]] = []
        for size, chunk, count in zip(reversed(self.shape), reversed(self.chunks), reversed(self.counts), strict=True):
            number, index = divmod(number, count)
            box.append((index * chunk, min(size, (index + 1) * chunk)))
        return StoredPiece(tuple(reversed(box)), NO_FILE, 0, self.nbytes, raw=False)

    def __iter__(self) -> Iterator[StoredPiece]:
        return (self[at] for at in range(len(self)))


@dataclass(frozen=True)
class Stored:
    """A tensor in files: its name, canonical dtype, global shape and pieces.

    `chunks` is the shape of the chunks where pieces form a regular grid, else None. That pieces cover the shape exactly
    once is checked by who reads a format.

    >>> stored = Stored("w", "float32", (8, 4), (StoredPiece(((0, 8), (0, 4)), 0, 80, 128),))
    >>> stored.nbytes, stored.stored_bytes, str(stored.as_stored)
    (128, 128, 'f32[8, 4]')
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[StoredPiece] = field(repr=False)
    chunks: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return dtypes.nbytes(math.prod(self.shape), self.dtype)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes that its pieces take in files."""
        if isinstance(self.pieces, ChunkGrid):
            return len(self.pieces) * self.pieces.nbytes
        return sum(piece.nbytes for piece in self.pieces)

    @cached_property
    def as_stored(self) -> Layout:
        """The source of a `Move` that reads it: all of it in one place, until a plan says who reads what."""
        return Layout.parse(f"{dtypes.short(self.dtype)}[{', '.join(map(str, self.shape))}]", Mesh(file=1))

    @cached_property
    def layout(self) -> Layout | None:
        """Where its elements are, as a layout over its chunks: None unless these form a grid that layouts can spell.

        >>> grid = ChunkGrid((10, 8), (3, 4), 48)
        >>> str(Stored("w", "float32", (10, 8), grid, grid.chunks).layout), Stored("w", "int8", (), ()).layout
        ('f32[{c0}3/10, {c1}4]', None)
        """
        if self.chunks is None:
            return None
        counts = [-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        mesh = Mesh({f"c{at}": count for at, count in enumerate(counts)})
        layout = Layout.from_spec(mesh, self.shape, self.dtype, [[f"c{at}"] for at in range(len(counts))])
        return layout if layout.tile_shape == self.chunks else None


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, and what says whether it is the same one later: bytes, and when it was changed."""

    path: str
    size: int
    changed_ns: int


@dataclass(frozen=True)
class Checkpoint(Mapping[str, Stored]):
    """What is stored at a path: tensors by their names, from metadata alone.

    `format` is one of "safetensors", "npy", "dcp", "zarr", "orbax", "hdf5". `ckpt[name]` is a `Stored`.
    """

    path: str
    format: str
    files: tuple[StoredFile, ...] = field(repr=False)
    tensors: Mapping[str, Stored] = field(repr=False)

    def __getitem__(self, name: str) -> Stored:
        try:
            return self.tensors[name]
        except (KeyError, TypeError):
            raise MissingTensorError(
                f"{quoted(self.path)} has no tensor {quoted(name)}{did_you_mean(name, self.tensors)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
