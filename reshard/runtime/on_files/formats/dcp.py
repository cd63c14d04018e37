"""Checkpoints of torch.distributed.checkpoint, read without torch and without running what is in them.

    .metadata        a pickle: for each tensor its dtype, shape and chunks, for each chunk a span of a file
    __0_0.distcp     chunks one behind the other, each a zip that torch.save wrote: data.pkl says how the tensor lies in
                     its storage (where it begins, strides), data/0 is the storage

A chunk's tensor may be a view of a larger storage, and may be transposed: both are told by the piece. Values that are
no tensors (a learning rate) are passed over. A folder without `.metadata` is a save that never ended.
"""

from __future__ import annotations

import math
import os
import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from reshard.errors import FileError, ReshardError, quoted
from reshard.plans.stored import Box, Checkpoint, Stored, StoredFile, StoredPiece
from reshard.runtime.on_files.formats.inert_pickle import Made, Named, quote_plain, read_pickle
from reshard.runtime.on_files.formats.metadata_files import (
    MOST_METADATA,
    OpenedFile,
    check_cover,
    file_error,
    find_chunks,
    measure_span,
    open_regular,
    read_metadata,
    read_side_by_side,
    read_sizes,
    resolve_inside,
)
from reshard.types import dtypes
from reshard.types.whole import MOST

# Zip archives inside files, whose entries are stored as they are: where each entry's bytes lie, and their CRC-32.
#
#     torch writes every tensor as one zip of a few entries, many of them in a file, one behind the other:
#
#     local header, name, padding | entry | ... | central directory | (zip64 end) | end of central directory
#
# Two reads show all of it, since the directory is at the end and the first entries at the start: thousands of zips are
# opened so. Sizes and CRC-32 stand in the directory alone, as torch writes entries before it knows them.


_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_FULL = 0xFFFFFFFF  # A size of 32 bits that says: see the zip64 field.
_DIRECTORY_ENTRY = struct.Struct("<4s6H3L5H2L")
_MOST_DIRECTORY = 1 << 16
_AT_ONCE = 1 << 13


class ZipEntry(NamedTuple):
    """Where the bytes of an entry begin, counted from the zip's own start, how many they are, and their CRC-32."""

    start: int
    nbytes: int
    crc32: int


class StoredZip:
    """A zip at a span of a file. Raises `FileError` for entries that are compressed or lie elsewhere."""

    def __init__(self, file: OpenedFile, start: int, nbytes: int, tensor: str) -> None:
        self._file, self._start, self._nbytes, self._tensor = file, start, nbytes, tensor
        if start + nbytes > file.size:
            raise self.refuse(f"its {nbytes} B end at byte {start + nbytes}, but the file has {file.size}", 0)
        self._tail = max(0, nbytes - _AT_ONCE)
        self._last = file.read(start + self._tail, nbytes - self._tail)
        self._first = file.read(start, min(_AT_ONCE, self._tail))
        self._directory = 0
        self.entries: dict[str, tuple[int, int, int]] = {}
        """Each entry of the directory: the offset of its local header, its bytes and its CRC-32."""
        try:
            self._read_directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self.refuse(f"its zip is damaged ({error})", nbytes) from None

    def refuse(self, found: str, at: int) -> FileError:
        """The error about a byte of the zip."""
        return file_error(
            self._file.path, f"{found}; copy the file again", tensor=self._tensor, offset=self._start + at
        )

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the zip, which usually have been read with its start or end."""
        if at < 0 or at + nbytes > self._nbytes:
            raise self.refuse(f"{quoted(nbytes)} B are said to be here, beyond the zip's {self._nbytes}", max(0, at))
        if at >= self._tail:
            return self._last[at - self._tail : at - self._tail + nbytes]
        if at + nbytes <= len(self._first):
            return self._first[at : at + nbytes]
        return self._file.read(self._start + at, nbytes)

    def find_entry(self, name: str) -> ZipEntry | None:
        """Where an entry is, if it is where the directory says."""
        if name not in self.entries:
            return None
        local, nbytes, crc = self.entries[name]
        header, named = self.read(local, 30), name.encode()
        begin = local + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        same = header[:4] == _LOCAL and self.read(local + 30, len(named)) == named
        if not same or header[8:10] != b"\0\0" or begin + nbytes > self._directory:
            raise self.refuse(f"the entry {quoted(name)} is not where its directory says", local)
        return ZipEntry(begin, nbytes, crc)

    def read_entry(self, name: str, most: int) -> bytes:
        """The bytes of a small entry."""
        entry = self.find_entry(name)
        if entry is None or entry.nbytes > most:
            raise self.refuse(f"its zip has no entry {quoted(name)} of at most {most} B", 0)
        return self.read(entry.start, entry.nbytes)

    def _read_directory(self) -> None:
        end = self._nbytes - 22
        signature, _, _, _, count, size, start, _ = struct.unpack("<4s4H2LH", self.read(end, 22))
        if signature != _END:
            raise self.refuse("no end of a zip is here", max(0, end))
        if end >= 20 and (locator := self.read(end - 20, 20))[:4] == _LOCATOR:
            end = int.from_bytes(locator[8:16], "little")
            fields = struct.unpack("<4sQ2H2L4Q", self.read(end, 56))
            if fields[0] != _END64:
                raise self.refuse("no zip64 end of a zip is here", end)
            count, size, start = fields[7:]
        if size > _MOST_DIRECTORY or start + size > end:
            raise self.refuse(f"its directory is said to have {quoted(size)} B at {quoted(start)}", end)
        self._directory = start
        directory, at = self.read(start, size), 0
        for _ in range(min(count, size // 46 + 1)):
            fields = _DIRECTORY_ENTRY.unpack_from(directory, at)
            signature, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
            packed, nbytes, name_size, extra_size, comment_size, local = *fields[8:13], fields[16]
            name = directory[at + 46 : at + 46 + name_size].decode()
            extra = directory[at + 46 + name_size : at + 46 + name_size + extra_size]
            if _FULL in (nbytes, packed, local):
                nbytes, packed, local = _widen_sizes(extra, (nbytes, packed, local))
            if signature != _ENTRY or name in self.entries:
                raise self.refuse(f"its directory is damaged at the entry {quoted(name)}", start + at)
            if method or flags & 1 or packed != nbytes:
                raise self.refuse(f"the entry {quoted(name)} is compressed or encrypted, which torch never does", local)
            self.entries[name] = local, nbytes, crc
            at += 46 + name_size + extra_size + comment_size
        if len(self.entries) != count or at != size:
            raise self.refuse(f"its directory has {len(self.entries)} entries instead of {quoted(count)}", start)


def _widen_sizes(extra: bytes, sizes: tuple[int, int, int]) -> list[int]:
    """Sizes and place of an entry, of which the zip64 field has those beyond 32 bits."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, size = struct.unpack("<2H", extra[at : at + 4])
        wide = extra[at + 4 : at + 4 + size] if kind == 1 else wide
        at += 4 + size
    places = iter(range(0, len(wide) - 7, 8))
    return [
        size if size != _FULL or (at := next(places, None)) is None else int.from_bytes(wide[at : at + 8], "little")
        for size in sizes
    ]


_METADATA = "torch.distributed.checkpoint.metadata"
_MOST_DIMS = 64  # As torch has it.
_MOST_PICKLE = 1 << 12  # What says how one tensor lies takes 200 B.
_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32",
    "LongStorage": "int64", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_DTYPES = ("qint8", "quint8", "qint32", "complex32", *dtypes.NAMES)
_KNOWN = {
    _METADATA: (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *_DTYPES),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath"),
}  # fmt: skip
"""The names that `.metadata` uses."""

_KNOWN_OF_CHUNKS = {
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
    "torch": (*_STORAGES, *_DTYPES),
    "torch.storage": ("UntypedStorage",),
    "collections": ("OrderedDict",),
}
"""The names that `data.pkl` of a chunk uses."""


class _Chunk(NamedTuple):
    """A box of a tensor, and the span of a file that has it."""

    name: str
    dtype: str
    box: Box
    start: int
    nbytes: int


_Spans = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
"""The file, first byte and bytes of the chunk of a tensor at a place."""


def read_dcp(path: str) -> Checkpoint:
    """What `.metadata` says of the tensors, and each chunk's zip of where its elements lie."""
    folder, where = (path, os.path.join(path, ".metadata")) if os.path.isdir(path) else (os.path.dirname(path), path)
    content, identity = read_metadata(where, MOST_METADATA)
    root = read_pickle(content, _KNOWN, lambda found, at: file_error(where, found, offset=at))
    fields = _read_state(where, root, "Metadata", None)
    tensors = _read_map(where, fields.get("state_dict_metadata"), "state_dict_metadata")
    spans = _read_spans(where, fields.get("storage_data"))
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks_of: defaultdict[str, list[_Chunk]] = defaultdict(list)
    for name, said in tensors.items():
        if type(name) is not str:
            raise file_error(where, f"a tensor is called {quote_plain(name)}; save it again", offset=0)
        if type(said) is Made and said.of.endswith(" BytesStorageMetadata"):
            continue
        dtype, shape, boxes = _read_tensor_metadata(where, name, said, len(spans))
        shapes[name] = dtype, shape
        for box in boxes:
            # Taken out: no two tensors have the same span, and a list of chunks that many share costs no more than one.
            span = spans.pop((name, tuple([start for start, _ in box])), None)
            if span is None:
                at = [start for start, _ in box]
                raise file_error(where, f"no file has the chunk at {at}; save it again", tensor=name, offset=0)
            file, start, nbytes = span
            chunks_of[file].append(_Chunk(name, dtype, box, start, nbytes))
    files: list[StoredFile] = []
    pickles: dict[bytes, Any] = {}
    pieces_of: defaultdict[str, list[StoredPiece]] = defaultdict(list)

    def read_chunks(of: tuple[int, str]) -> tuple[StoredFile, list[StoredPiece]]:
        number, file = of
        with open_regular(resolve_inside(folder, file, where)) as opened:
            return opened.identity, [_read_chunk(opened, number, chunk, pickles) for chunk in chunks_of[file]]

    listed = [*enumerate(sorted(chunks_of))]
    for (_, file), (found_file, pieces) in zip(listed, read_side_by_side(read_chunks, listed), strict=True):
        files.append(found_file)
        for chunk, piece in zip(chunks_of[file], pieces, strict=True):
            pieces_of[chunk.name].append(piece)
    found: dict[str, Stored] = {}
    for name, (dtype, shape) in shapes.items():
        # Ranks without a part of a tensor may have written a chunk without elements.
        filled = [piece for piece in pieces_of[name] if piece.nbytes]
        pieces = sorted(filled, key=lambda piece: piece.box) or pieces_of[name][:1]
        found[name] = Stored(name, dtype, shape, tuple(pieces), find_chunks(shape, pieces))
        check_cover(where, found[name])
    return Checkpoint(path, "dcp", (*files, identity), found)


def _read_tensor_metadata(where: str, name: str, said: Any, most: int) -> tuple[str, tuple[int, ...], list[Box]]:
    """Dtype, shape and boxes of a tensor, of which there are at most so many."""
    fields = _read_state(where, said, "TensorStorageMetadata", name)
    properties = fields.get("properties")
    state: Any = properties.state if type(properties) is Made else None
    # torch writes the properties as a tuple, in some versions as a dict.
    named = None
    if isinstance(state, dict):
        named = cast("dict[str, Any]", state).get("dtype")
    elif isinstance(state, tuple) and state:
        named = cast("tuple[Any, ...]", state)[0]
    dtype = _read_dtype(where, name, named)
    shape = _read_torch_size(where, name, fields.get("size"))
    if math.prod(size for size in shape if size) * 16 > MOST:
        raise file_error(where, f"its shape {quoted(shape)} has more elements than any array", tensor=name, offset=0)
    chunks = fields.get("chunks")
    if type(chunks) is not list or len(cast("list[Any]", chunks)) > most:
        raise file_error(where, f"its chunks are no list of at most {most}; save it again", tensor=name, offset=0)
    boxes: list[Box] = []
    for each in cast("list[Any]", chunks):
        chunk = _read_state(where, each, "ChunkStorageMetadata", name)
        starts, sizes = (_read_torch_size(where, name, chunk.get(field)) for field in ("offsets", "sizes"))
        if not len(starts) == len(sizes) == len(shape):
            raise file_error(where, f"a chunk has another number of dims than {quoted(shape)}", tensor=name, offset=0)
        boxes.append(tuple([(start, start + size) for start, size in zip(starts, sizes, strict=True)]))
    return dtype, shape, boxes


def _read_spans(where: str, said: Any) -> _Spans:
    """The span of a file that each chunk has: by tensor and place, file, first byte and bytes."""
    spans: _Spans = {}
    for index, info in _read_map(where, said, "storage_data").items():
        key, span = _read_state(where, index, "MetadataIndex", None), _read_state(where, info, "_StorageInfo", None)
        name, place = key.get("fqn"), key.get("offset")
        file, start, nbytes = (span.get(field) for field in ("relative_path", "offset", "length"))
        if type(name) is not str or type(file) is not str:
            what = f"{quote_plain(name)} is in file {quote_plain(file)}"
            raise file_error(where, f"a chunk of {what}; save it again", offset=0)
        where_in_file = read_sizes([start, nbytes])
        if where_in_file is None:
            what = f"{quote_plain(nbytes)} B at byte {quote_plain(start)}"
            raise file_error(where, f"a chunk is {what}; save it again", tensor=name, offset=0)
        if span.get("transform_descriptors"):
            raise file_error(where, "its chunks are transformed (compressed); save it without", tensor=name, offset=0)
        start, nbytes = where_in_file
        spans[name, None if place is None else _read_torch_size(where, name, place)] = file, start, nbytes
    return spans


def _read_chunk(file: OpenedFile, number: int, chunk: _Chunk, pickles: dict[bytes, Any]) -> StoredPiece:
    """Where the elements of a chunk lie, by the zip that it is; `pickles` are those read before, most of them equal."""
    zipped = StoredZip(file, chunk.start, chunk.nbytes, chunk.name)
    top = next((name.removesuffix("data.pkl") for name in zipped.entries if name.endswith("/data.pkl")), "archive/")

    def refuse(found: str, at: int = 0) -> FileError:
        return file_error(file.path, f"{found}; save it again", tensor=chunk.name, offset=chunk.start + at)

    if f"{top}byteorder" in zipped.entries and zipped.read_entry(f"{top}byteorder", 16) != b"little":
        raise refuse("it was written by a big-endian machine")
    content = zipped.read_entry(f"{top}data.pkl", _MOST_PICKLE)
    if content not in pickles:
        pickles[content] = read_pickle(content, _KNOWN_OF_CHUNKS, refuse)
    made = pickles[content]
    if type(made) is Made and made.of == "torch._utils _rebuild_parameter" and made.args:
        made = made.args[0]
    if type(made) is not Made or not made.of.startswith("torch._utils _rebuild_tensor_v") or len(made.args) < 6:
        raise refuse("its data.pkl holds no tensor")
    storage, first, sizes, strides, *others = made.args
    stored: Any = storage.args[0] if type(storage) is Made and storage.of == "persistent id" else None
    if type(stored) is not tuple or len(cast("tuple[Any, ...]", stored)) != 5:
        raise refuse("its data.pkl names no storage")
    _, kind, key, _, count = cast("tuple[Any, ...]", stored)
    untyped = type(kind) is Named and kind == "torch.storage UntypedStorage"
    dtype: Any = others[-1] if untyped else None  # A storage without a type is of bytes.
    if type(kind) is Named and not untyped:
        dtype = Named(f"torch {_STORAGES.get(kind.removeprefix('torch '), '')}")
    if type(dtype) is not Named or dtype != f"torch {chunk.dtype}":
        raise refuse(f"its elements are {quote_plain(dtype)}, but the metadata say {chunk.dtype}")
    item = dtypes.bits(chunk.dtype) // 8
    extents = tuple([stop - start for start, stop in chunk.box])
    steps: list[Any] = list(cast("tuple[Any, ...]", strides)) if type(strides) is tuple else [None]
    places = read_sizes([first, count, *steps])
    if type(sizes) is not tuple or sizes != extents or places is None or len(places) != 2 + len(extents):
        raise refuse(f"its shape or strides do not fit the extents {extents} in the metadata")
    entry = zipped.find_entry(f"{top}data/{key}") if type(key) is str else None
    if entry is None:
        raise refuse(f"its zip has no storage {quote_plain(key)}")
    first, count, *strides = places
    span, spaced = measure_span(extents, strides)
    if (first + span) * item > entry.nbytes or count * (1 if untyped else item) != entry.nbytes:
        raise refuse(f"elements {first} to {first + span} are used of a storage of {entry.nbytes} B", entry.start)
    # Only the CRC-32 of a whole storage is known, and not that of a part of it.
    checksum = ("crc32", entry.crc32) if span * item == entry.nbytes else None
    where = chunk.start + entry.start + first * item
    return StoredPiece(chunk.box, number, where, span * item, True, checksum, spaced)


def _read_state(where: str, made: Any, kind: str, tensor: str | None) -> Mapping[str, Any]:
    """The fields of an object of a class."""
    state = made.state if type(made) is Made and made.of.endswith(f" {kind}") else None
    if type(state) is not dict:
        raise file_error(where, f"a {kind} is missing, or has no fields; save it again", tensor=tensor, offset=0)
    return cast("dict[str, Any]", state)


def _read_map(where: str, said: Any, field: str) -> Mapping[Any, Any]:
    if type(said) is not dict:
        raise file_error(where, f"{field} is missing or no map; save it again", offset=0)
    return cast("dict[Any, Any]", said)


def _read_torch_size(where: str, name: str, said: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    args: Any = said.args[0] if type(said) is Made and said.of == "torch Size" and len(said.args) == 1 else None
    listed: list[Any] = list(cast("tuple[Any, ...]", args)) if type(args) is tuple else [None]
    sizes = read_sizes(listed) if len(listed) <= _MOST_DIMS else None
    if sizes is None:
        raise file_error(where, "a size is missing, or its numbers are none; save it again", tensor=name, offset=0)
    return sizes


def _read_dtype(where: str, name: str, named: Any) -> str:
    try:
        dtype = dtypes.canonical(named.removeprefix("torch ") if type(named) is Named else None)
        if dtypes.bits(dtype) >= 8:
            return dtype
    except ReshardError:
        pass
    raise file_error(where, f"its dtype is {quote_plain(named)}, which layouts do not know", tensor=name, offset=0)
