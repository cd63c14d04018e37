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

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, overload

from reshard.errors import FileError, MissingTensorError, did_you_mean, quoted, shortened
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.units import bytes_text, counted, shape_text
from reshard.types.whole import MOST

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dim."""

_NUMBER = re.compile("[0-9]+")

_ONE_FILE = Mesh(file=1)
_parse_layout = lru_cache(maxsize=1024)(Layout.parse)  # The tensors of a model have few shapes.

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
    Where it is known which chunks there are, `sizes` has the bytes of each by its number: a chunk that is not in it is
    missing, a piece of 0 bytes.

    >>> grid = ChunkGrid((1000, 300), (256, 128), 4 * 256 * 128)
    >>> len(grid), grid[11].box
    (12, ((768, 1000), (256, 300)))
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    nbytes: int
    sizes: Mapping[int, int] | None = field(default=None, repr=False, hash=False)

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
        nbytes = self.nbytes if self.sizes is None else self.sizes.get(range(len(self))[at], 0)
        return StoredPiece(tuple(reversed(box)), NO_FILE, 0, nbytes, raw=False)

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
            sizes = self.pieces.sizes
            return len(self.pieces) * self.pieces.nbytes if sizes is None else sum(sizes.values())
        return sum(piece.nbytes for piece in self.pieces)

    @cached_property
    def as_stored(self) -> Layout:
        """The source of a `Move` that reads it: all of it in one place, until a plan says who reads what."""
        return _parse_layout(f"{dtypes.short(self.dtype)}[{', '.join(map(str, self.shape))}]", _ONE_FILE)

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
        layout = Layout.from_spec([[f"c{at}"] for at in range(len(counts))], mesh, self.shape, self.dtype)
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

    def __contains__(self, name: object) -> bool:
        return name in self.tensors  # A mapping's own would take the error of a missing name for no answer.

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __str__(self) -> str:
        return self.describe(40)

    def describe(self, most: int | None = None) -> str:
        """The tensors as a table of at most so many rows; names that differ by numbers share one.

        >>> pieces = [(StoredPiece(((0, 8), (0, 4)), 0, n * 128, 128),) for n in range(3)]
        >>> tensors = {f"h.{n}.w": Stored(f"h.{n}.w", "float32", (8, 4), pieces[n]) for n in range(3)}
        >>> print(Checkpoint("a.safetensors", "safetensors", (StoredFile("a.safetensors", 384, 0),), tensors))
        'a.safetensors': 3 tensors, 384 B in 1 file (safetensors)
          tensors        elements   bytes each  stored
          h.{0..2}.w  3  f32[8, 4]       128 B  raw
        """
        # 45,000 tensors are a few dozen rows: what differs from layer to layer is a number in the name.
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, stored in self.tensors.items():
            shape = f"{dtypes.short(stored.dtype)}[{', '.join(map(str, stored.shape))}]"
            first, count = next(iter(stored.pieces), None), len(stored.pieces)
            chunks = "" if stored.chunks is None else f" of {shape_text(stored.chunks)}"
            how = ("raw" if first is None or first.raw else "coded") + (
                f", {count} pieces{chunks}" if count > 1 else ""
            )
            key = _NUMBER.sub("#", name), shape, bytes_text(stored.nbytes), how
            alike.setdefault(key, []).append(name)
        rows = [("tensors", "", "elements", "bytes each", "stored")]
        for (_, shape, size, how), names in list(alike.items())[:most]:
            count = "" if len(names) == 1 else str(len(names))
            rows.append((_name_together(names), count, shape, size, how))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"  {name:<{widths[0]}}  {count:>{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}  {how}"
            for name, count, shape, size, how in rows
        ]
        if len(alike) > len(rows) - 1:
            lines.append(f"  ... and {counted(len(alike) - len(rows) + 1, 'row')} more")
        # Metadata files, which are in `files` as well, hold no piece.
        tensors, held = self.tensors.values(), sum(stored.nbytes for stored in self.tensors.values())
        places = {
            piece.file for stored in tensors if not isinstance(stored.pieces, ChunkGrid) for piece in stored.pieces
        }
        where = f" in {counted(len(places - {NO_FILE}), 'file')}" if places - {NO_FILE} else ""
        total = f"{counted(len(self.tensors), 'tensor')}, {bytes_text(held)}{where} ({self.format})"
        return "\n".join([f"{quoted(self.path)}: {total}", *lines])

    def to_json(self) -> str:
        """All of it as JSON, in about 100 bytes a tensor: what one process of many reads, and the others are sent."""
        tensors = {
            name: [stored.dtype, stored.shape, stored.chunks, _write_pieces(stored)]
            for name, stored in self.tensors.items()
        }
        files = [[file.path, file.size, file.changed_ns] for file in self.files]
        made = {"format": 1, "path": self.path, "stored_as": self.format, "files": files, "tensors": tensors}
        return json.dumps(made, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Checkpoint:
        """What `to_json` wrote; raises `FileError` for any other text."""
        try:
            made = json.loads(text)  # Text of unknown origin: every value is checked for its type before it is used.
            if made["format"] != 1:
                raise ValueError(f"format is {quoted(made['format'])}, and this version reads format 1")
            path, stored_as = _checked(made["path"], str), _checked(made["stored_as"], str)
            files = tuple([StoredFile(_checked(p, str), _size(n), _checked(at, int)) for p, n, at in made["files"]])
            tensors = {
                name: _read_stored(name, said, len(files)) for name, said in _checked(made["tensors"], dict).items()
            }
            return cls(path, stored_as, files, tensors)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            why = shortened(f"{type(error).__name__}: {error}")
            raise FileError(f"this is not a checkpoint in JSON ({why}); use the output of to_json()") from None


def _name_together(names: Sequence[str]) -> str:
    """One name for names that differ in numbers only: `h.{0..2}.w`."""
    parts = _NUMBER.split(names[0])
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    ranges = [
        str(min(each)) if min(each) == max(each) else f"{{{min(each)}..{max(each)}}}" for each in map(list, columns)
    ]
    name = "".join(part for pair in zip(parts, [*ranges, ""], strict=True) for part in pair)
    return shortened(name, 100) if name.isprintable() else quoted(name)


def _write_pieces(stored: Stored) -> Any:
    """Pieces as JSON: of a grid only what one chunk takes, and of others no box that is the whole, no usual values."""
    if isinstance(stored.pieces, ChunkGrid):
        return stored.pieces.nbytes
    # Most tensors are one raw piece: [file, offset, nbytes].
    whole_box = tuple([(0, size) for size in stored.shape])
    written: list[list[Any]] = []
    for box, file, offset, nbytes, raw, checksum, strides in stored.pieces:
        fields = [file, offset, nbytes, None if box == whole_box else box, raw, checksum, strides]
        usual: list[Any] = [None, True, None, None]
        while usual and fields[-1] == usual[-1]:
            del fields[-1], usual[-1]
        written.append(fields)
    return written


def _read_stored(name: str, said: Any, files: int) -> Stored:
    dtype, sizes, chunked, pieces_said = _checked(said, list)
    shape = tuple([_size(size) for size in _checked(sizes, list)])
    chunks = None if chunked is None else tuple([_size(size, 1) for size in _checked(chunked, list)])
    dtypes.bits(dtype)  # A LookupError or TypeError unless it is a canonical name.
    if chunks is not None and len(chunks) != len(shape):
        raise ValueError(f"chunks {quoted(chunks)} of tensor {quoted(name)}")
    if type(pieces_said) is int:
        if chunks is None:
            raise ValueError(f"tensor {quoted(name)} has a grid of chunks without their shape")
        return Stored(name, dtype, shape, ChunkGrid(shape, chunks, _size(pieces_said)), chunks)
    pieces: list[StoredPiece] = []
    whole_box = tuple([(0, size) for size in shape])
    for file, offset, nbytes, *rest in _checked(pieces_said, list):
        if not NO_FILE <= _checked(file, int) < files:
            raise ValueError(f"tensor {quoted(name)} is in file {quoted(file)} of {files}")
        where = file, _size(offset), _size(nbytes)
        if not rest:  # Nearly all: one piece that is the whole tensor.
            pieces.append(StoredPiece(whole_box, *where))
            continue
        usual: tuple[Any, ...] = (None, True, None, None)
        boxed, raw, checksum, strided = (*rest, *usual[len(rest) :])
        box = whole_box if boxed is None else tuple([(_size(start), _size(stop)) for start, stop in boxed])
        if not all(start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)):
            raise ValueError(f"a piece of tensor {quoted(name)} is outside its shape")
        checked = None if checksum is None else (_checked(checksum[0], str), _checked(checksum[1], int))
        strides = None if strided is None else tuple([_size(stride) for stride in strided])
        if strides is not None and len(strides) != len(shape):
            raise ValueError(f"strides {strides} of tensor {quoted(name)}")
        pieces.append(StoredPiece(box, *where, _checked(raw, bool), checked, strides))
    return Stored(name, dtype, shape, tuple(pieces), chunks)


def _checked(value: Any, kind: type[Any]) -> Any:
    # Exactly that type: isinstance takes True for an int.
    if type(value) is not kind:
        raise TypeError(f"{quoted(value)} instead of {kind.__name__}")
    return value


def _size(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError(f"{quoted(value)} is no whole number from {least} to 2^63")
    return value
