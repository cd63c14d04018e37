"""Zarr, versions 2 and 3: what `zarr.json` and `.zarray` say, and which chunk is in which file.

    era5.zarr/                          tensors
      zarr.json                         a group has no elements
      t2m/zarr.json, t2m/c/0/0 ...      "t2m", one file a chunk, or a shard of many inner chunks
      sfc/wind/.zarray, sfc/wind/0.0    "sfc/wind", of version 2

A store that is one array has it under the name "". Uncompressed chunks are raw pieces, but for those that
the shape clips in an inner dim, whose rows lie apart. These and all others are coded: `TensorStoreDriver` decodes them
whole. The files are listed, since a chunk without a file would be read as the
fill value without a word: such a piece is of 0 bytes here, and who reads it must say that the value is meant.

A shard ends (or begins) with an index of (offset, bytes) of its inner chunks, under a CRC-32C: read here, as it says
which of them are there, and as ranges that overlap or lie outside the file are refused before anything is read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np

from reshard.errors import ChecksumError, FileError, LayoutError, PlanError, quoted
from reshard.plans.stored import NO_FILE, Box, Checkpoint, ChunkGrid, Stored, StoredFile, StoredPiece
from reshard.runtime.on_files.formats.metadata_files import file_error, open_regular, read_metadata, read_side_by_side
from reshard.runtime.on_files.formats.new_arrays import NewArray
from reshard.types import dtypes
from reshard.types.json_fields import Fields
from reshard.types.whole import MOST

MOST_LISTED = 1 << 16
"""The most chunks of a tensor whose pieces are listed one by one, with their places; of more, only their sizes are."""

_ABSENT = (1 << 64) - 1  # In the index of a shard: no such chunk.
_CODECS_3 = ("bytes", "transpose", "gzip", "zstd", "blosc", "crc32c", "sharding_indexed")
_CODECS_2 = ("zlib", "gzip", "bz2", "zstd", "blosc")
_NO_NUMBERS = re.compile(
    r"[<>|=]?[SUMmOV]\d*(\[.*\])?|string|bytes|r\d+|numpy\..*|struct.*|.*_utf32|.*length_.*|null_.*"
)
_MOST_DIMS = 32
_CURE = "write the array again, or with another library"


@dataclass(frozen=True)
class ZarrHeader:
    """What the metadata of an array say. `file_chunks` is what a file (or a key) has, a chunk or a shard of chunks.

    `index` says where the index of a shard is: "start", "end", or "" where files are no shards.
    """

    version: int
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    file_chunks: tuple[int, ...]
    raw: bool
    order: str = "C"
    prefix: str = ""
    separator: str = "."
    index: str = ""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk, decoded."""
        return dtypes.nbytes(math.prod(self.chunks), self.dtype)

    def number_keys(self, keys: Collection[str]) -> dict[int, str]:
        """The number of each key that is one of a chunk's file, in C order; other keys are left out."""
        counts = [-(-size // chunk) for size, chunk in zip(self.shape, self.file_chunks, strict=True)]
        # An array without dims is one chunk, called "c" in version 3 and "0" in version 2.
        if not counts:
            key = self.prefix.rstrip(self.separator) if self.prefix else "0"
            return {0: key} if key in keys else {}
        found: dict[int, str] = {}
        form = re.compile(re.escape(self.prefix) + re.escape(self.separator).join(["(0|[1-9][0-9]*)"] * len(counts)))
        for key in keys:
            match = form.fullmatch(key)
            if match is None:
                continue
            number = 0
            for index, count in zip(map(int, match.groups()), counts, strict=True):
                number = number * count + index if index < count and number >= 0 else -1
            if number >= 0:  # Else a remainder of a time when the array was larger.
                found[number] = key
        return found


def read_zarr(path: str) -> Checkpoint:
    """The arrays of a zarr store that hold numbers; those of text or dates are left out."""
    found = list_folder_files(path)
    headers: dict[str, ZarrHeader | None] = {}
    files: list[StoredFile] = []
    described: list[StoredFile] = []
    for at in sorted(found):
        folder, _, name = at.rpartition("/")
        # Where both are, version 3 is what libraries read.
        if name == "zarr.json" or (name == ".zarray" and f"{folder}/zarr.json".lstrip("/") not in found):
            headers[folder] = None
            described.append(found[at])
    texts = read_side_by_side(lambda file: read_metadata(file.path)[0], described)
    for folder, file, text in zip(list(headers), described, texts, strict=True):
        headers[folder] = parse_zarr_header(text, file.path)
        files.append(file)
    # A chunk belongs to the nearest folder above it that has metadata: it may lie deeper, as c/0/3 does.
    keyed: dict[str, dict[str, StoredFile]] = {folder: {} for folder in headers}
    for at, file in found.items():
        folder = at.rpartition("/")[0]
        while folder not in keyed and folder:
            folder = folder.rpartition("/")[0]
        if folder in keyed:
            keyed[folder][at[len(folder) :].lstrip("/")] = file
    tensors = {
        name: _place_chunks(header, name, keyed[name], files) for name, header in headers.items() if header is not None
    }
    return Checkpoint(path, "zarr", tuple(files), tensors)


def list_folder_files(root: str) -> dict[str, StoredFile]:
    """Every file below a folder by its path there, with slashes; links that lead out of it are refused."""
    found: dict[str, StoredFile] = {}
    real_root = os.path.join(os.path.realpath(root), "")
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except OSError as error:
            raise file_error(os.path.join(root, folder), f"cannot be listed ({error.strerror})") from None
        for entry in entries:
            # A link to a folder may lead back to one above it, and then the list would never end.
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                if not real.startswith(real_root) or os.path.isdir(real):
                    raise file_error(entry.path, f"is a link to {quoted(real)}; put the files themselves there")
            if entry.is_dir():
                waiting.append(f"{folder}{entry.name}/")
                continue
            try:
                status = entry.stat()
            except OSError as error:
                raise file_error(entry.path, f"cannot be looked at ({error.strerror})") from None
            # Opening a pipe would wait for somebody who writes to it.
            if not stat.S_ISREG(status.st_mode):
                raise file_error(entry.path, "is not a regular file; put the file itself there")
            found[folder + entry.name] = StoredFile(entry.path, status.st_size, status.st_mtime_ns)
    return found


def parse_zarr_header(text: bytes, path: str) -> ZarrHeader | None:
    """What `zarr.json` or `.zarray` says; None for a group, or an array that holds no numbers."""
    try:
        fields = Fields.read(text, "the metadata of a zarr array", _CURE)
        version = fields.get("zarr_format", int)
        if version == 3:
            return _parse_version_3(fields)
        if version == 2:
            return _parse_version_2(fields)
        raise fields.error(f"zarr_format is {version}, and 2 and 3 are read")
    except (PlanError, LayoutError) as error:
        raise FileError(f"{quoted(path)}: {error}") from None


def _parse_version_3(fields: Fields) -> ZarrHeader | None:
    if fields.get("node_type", str) != "array":
        return None
    # Extensions write an object with a name in the place of a name.
    named = fields.data.get("data_type")
    kind = named if isinstance(named, str) else Fields.of(named, fields.what, "data_type", _CURE).get("name", str)
    if _NO_NUMBERS.fullmatch(kind):
        return None
    dtype = _check_dtype(fields, kind)
    shape = _read_chunk_sizes(fields, "shape", 0)
    grid = Fields.of(fields.object("chunk_grid"), fields.what, "chunk_grid", _CURE)
    if grid.get("name", str) != "regular":
        raise grid.error(f"name is {quoted(grid.get('name', str))}, and only regular grids are read")
    settings = Fields.of(grid.object("configuration"), fields.what, "chunk_grid", _CURE)
    outer = _read_chunk_sizes(settings, "chunk_shape", 1, len(shape))
    encoding = Fields.of(fields.object("chunk_key_encoding"), fields.what, "chunk_key_encoding", _CURE)
    style = encoding.get("name", str)
    if style not in ("default", "v2"):
        raise encoding.error(f"name is {quoted(style)}, and 'default' and 'v2' are read")
    spelled = Fields.of(encoding.get("configuration", dict, default={}), fields.what, "chunk_key_encoding", _CURE)
    separator = spelled.get("separator", str, default="/" if style == "default" else ".")
    if separator not in ("/", "."):
        raise spelled.error(f"separator is {quoted(separator)}, not '/' or '.'")
    prefix = f"c{separator}" if style == "default" else ""
    # Something between the chunks and their keys: what is read here would not be chunks.
    if fields.data.get("storage_transformers"):
        raise fields.error("storage_transformers are not read")
    codecs = _read_codecs(fields, "codecs")
    names = [codec.get("name", str) for codec in codecs]
    # "bytes" turns elements into bytes; with nothing before or after it they lie as in memory.
    if "sharding_indexed" not in names:
        raw = names == ["bytes"] and _is_little(codecs[0], dtype)
        return ZarrHeader(3, dtype, shape, outer, outer, raw, prefix=prefix, separator=separator)
    # A codec after the shards would have to be undone before one of their chunks can be found.
    if names != ["sharding_indexed"]:
        raise fields.error(f"codecs around shards are {names}, and sharding_indexed is read alone")
    shards = Fields.of(codecs[0].object("configuration"), fields.what, "sharding_indexed", _CURE)
    inner = _read_chunk_sizes(shards, "chunk_shape", 1, len(shape))
    if any(whole % part for whole, part in zip(outer, inner, strict=True)):
        raise shards.error(f"chunk_shape {inner} does not divide the shards of {outer}")
    index = shards.get("index_location", str, default="end")
    if index not in ("start", "end"):
        raise shards.error(f"index_location is {quoted(index)}, not 'start' or 'end'")
    if [codec.get("name", str) for codec in _read_codecs(shards, "index_codecs")] != ["bytes", "crc32c"]:
        raise shards.error("index_codecs are not bytes and crc32c")
    coded = _read_codecs(shards, "codecs")
    if any(codec.get("name", str) == "sharding_indexed" for codec in coded):
        raise shards.error("shards of shards are not read")
    raw = len(coded) == 1 and coded[0].get("name", str) == "bytes" and _is_little(coded[0], dtype)
    return ZarrHeader(3, dtype, shape, inner, outer, raw, prefix=prefix, separator=separator, index=index)


def _parse_version_2(fields: Fields) -> ZarrHeader | None:
    kind = fields.data.get("dtype")
    if not (isinstance(kind, str) and kind) and not isinstance(kind, list):
        raise fields.error(f"dtype is {quoted(kind)}, not text")
    # A list is a struct of several numbers.
    if not isinstance(kind, str) or _NO_NUMBERS.fullmatch(kind):
        return None
    dtype = "bool" if kind == "|b1" else _check_dtype(fields, "<" + kind[1:] if kind[0] == "|" else kind)
    shape = _read_chunk_sizes(fields, "shape", 0)
    chunks = _read_chunk_sizes(fields, "chunks", 1, len(shape))
    order = fields.get("order", str)
    separator = fields.get("dimension_separator", str, default=".")
    if order not in ("C", "F") or separator not in ("/", "."):
        raise fields.error(f"order is {quoted(order)} and dimension_separator {quoted(separator)}")
    if fields.data.get("filters"):
        raise fields.error("filters are not read")
    packed = fields.data.get("compressor")
    if packed is not None:
        coder = Fields.of(packed, fields.what, "compressor", _CURE)
        if coder.get("id", str) not in _CODECS_2:
            raise coder.error(f"id is {quoted(coder.get('id', str))}, and {', '.join(_CODECS_2)} are read")
    return ZarrHeader(2, dtype, shape, chunks, chunks, packed is None and kind[0] != ">", order, "", separator)


def _check_dtype(fields: Fields, kind: str) -> str:
    dtype = dtypes.canonical(kind)
    if dtypes.bits(dtype) < 8:
        raise fields.error(f"its dtype is {dtype}, and elements of less than a byte are not read")
    return dtype


def _read_chunk_sizes(fields: Fields, name: str, least: int, dims: int | None = None) -> tuple[int, ...]:
    sizes = tuple(fields.listed(name, int))
    if len(sizes) > _MOST_DIMS or (dims is not None and len(sizes) != dims):
        raise fields.error(f"{name} has {len(sizes)} dims, not {f'at most {_MOST_DIMS}' if dims is None else dims}")
    # A product beyond the largest number would overflow in the library that decodes.
    if any(not least <= size <= MOST for size in sizes) or math.prod(sizes) > MOST:
        raise fields.error(f"{name} is {quoted(list(sizes))}, whose sizes or product are out of range")
    return sizes


def _read_codecs(fields: Fields, name: str) -> list[Fields]:
    """The codecs of a list, each a known one; a name alone stands for a codec without settings."""
    codecs: list[Fields] = []
    for item in cast("list[Any]", fields.get(name, list)):
        codec = Fields.of({"name": item} if isinstance(item, str) else item, fields.what, name, _CURE)
        if codec.get("name", str) not in _CODECS_3:
            raise codec.error(f"the codec is {quoted(codec.get('name', str))}, and {', '.join(_CODECS_3)} are read")
        codecs.append(codec)
    if not codecs:
        raise fields.error(f"{name} are none")
    return codecs


def _is_little(codec: Fields, dtype: str) -> bool:
    settings: Mapping[str, Any] = codec.get("configuration", dict, default={})
    return settings.get("endian", "little") == "little" or dtypes.bits(dtype) == 8


def _place_chunks(header: ZarrHeader, name: str, keyed: Mapping[str, StoredFile], files: list[StoredFile]) -> Stored:
    """A tensor whose chunks are in these files, by their keys; adds the files that pieces are in to `files`."""
    numbered = header.number_keys(keyed)
    grid = ChunkGrid(header.shape, header.chunks, header.chunk_bytes)
    numbers: dict[int, tuple[int, int, int]] = {}  # Of each chunk that is there its file, offset and bytes.
    order = sorted(numbered)
    shards = [keyed[numbered[number]] for number in order] if header.index else []
    indexes = read_side_by_side(lambda file: _read_shard_index(header, name, file), shards)
    for number in order:
        file = keyed[numbered[number]]
        if header.index:
            held = next(indexes)
            if header.raw:
                _check_lengths(header, name, file, held)
            numbers |= {number_inner(header, number, inner): (len(files), *span) for inner, span in held.items()}
            numbers.pop(-1, None)
        elif header.raw and file.size != header.chunk_bytes:
            raise file_error(
                file.path,
                f"has {file.size} B, and a chunk of {header.chunks} takes {header.chunk_bytes}; copy the file again",
                tensor=name,
            )
        else:
            numbers[number] = (len(files), 0, file.size)
        files.append(file)
    if len(grid) > MOST_LISTED:
        sizes = {number: nbytes for number, (_, _, nbytes) in numbers.items()}
        return Stored(
            name, header.dtype, header.shape, ChunkGrid(grid.shape, grid.chunks, grid.nbytes, sizes), grid.chunks
        )
    pieces: list[StoredPiece] = []
    for number, (box, *_) in enumerate(grid):
        place = numbers.get(number)
        if place is not None and header.raw:
            pieces.append(place_uncoded(box, header.chunks, header.dtype, *place[:2], order=header.order))
        else:
            # A chunk that is missing has no bytes; whether it means zeros is asked when it is read.
            pieces.append(StoredPiece(box, *(place or (NO_FILE, 0, 0)), raw=False))
    return Stored(name, header.dtype, header.shape, tuple(pieces), header.chunks)


def place_uncoded(
    box: Box, chunks: Sequence[int], dtype: str, file: int, offset: int, *, order: str = "C"
) -> StoredPiece:
    """The piece in an uncompressed chunk, which is stored whole, though the shape may clip its box.

    Rows that are clipped lie apart: such a chunk is decoded whole, so that a sum of its elements can be compared. In
    Fortran's order elements lie apart in any case.
    """
    clipped = [stop - start for start, stop in box]
    if order == "C" and clipped[1:] != list(chunks[1:]):
        return StoredPiece(box, file, offset, dtypes.nbytes(math.prod(chunks), dtype), raw=False)
    if order == "C":
        return StoredPiece(box, file, offset, dtypes.nbytes(math.prod(clipped), dtype))
    # The first dim is the densest; from the first element to the end of the last is what is to be read.
    strides = tuple(itertools.accumulate(chunks[:-1], operator.mul, initial=1))[: len(chunks)]
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(clipped, strides, strict=True))
    return StoredPiece(box, file, offset, dtypes.nbytes(span, dtype), strides=strides)


def number_inner(header: ZarrHeader, shard: int, inner: int) -> int:
    """The number of a shard's inner chunk among all of the tensor, -1 where it lies outside the shape."""
    # Dim by dim from the last one on, as digits of a number whose radices are the chunks along each dim.
    number, scale = 0, 1
    for size, chunk, outer in zip(
        *(reversed(each) for each in (header.shape, header.chunks, header.file_chunks)), strict=True
    ):
        shard, high = divmod(shard, -(-size // outer))
        inner, low = divmod(inner, outer // chunk)
        at, count = high * (outer // chunk) + low, -(-size // chunk)
        if at >= count:
            return -1
        number, scale = number + at * scale, scale * count
    return number


def _read_shard_index(header: ZarrHeader, name: str, file: StoredFile) -> dict[int, tuple[int, int]]:
    """Offset and bytes of the inner chunks that a shard has."""
    count = math.prod(outer // inner for outer, inner in zip(header.file_chunks, header.chunks, strict=True))
    length = 16 * count + 4
    start = file.size - length if header.index == "end" else 0
    if file.size < length:
        raise file_error(
            file.path,
            f"has {file.size} B, and the index of {count} chunks alone takes {length}; copy the file again",
            tensor=name,
        )
    # The index alone is read, however long the shard is.
    with open_regular(file.path) as opened:
        text = opened.read(start, length)
    found, said = checksum_crc32c(text[:-4]), int.from_bytes(text[-4:], "little")
    if found != said:
        raise file_error(
            file.path,
            f"the index of the shard has the CRC-32C {found:#x}, not {said:#x}; restore the file",
            tensor=name,
            offset=start,
            kind=ChecksumError,
        )
    table = np.frombuffer(text, "<u8", 2 * count).reshape(count, 2)
    held = {at: (int(offset), int(size)) for at, (offset, size) in enumerate(table) if int(offset) != _ABSENT}
    low, high = (0, start) if header.index == "end" else (length, file.size)
    # Chunks that share bytes, or reach into the index, would be read as data without a word.
    end = low
    for offset, size in sorted(held.values()):
        if offset < end or offset + size > high:
            what = "overlaps one before it" if low <= offset < end else "lies outside the chunks of the file"
            raise file_error(
                file.path,
                f"its index has a chunk of {size} B there, which {what}; restore the file",
                tensor=name,
                offset=offset,
            )
        end = offset + size
    return held


def checksum_crc32c(data: bytes) -> int:
    """The CRC-32C of bytes, by a library if there is one: a small index takes a moment without.

    >>> hex(checksum_crc32c(b"123456789"))
    '0xe3069283'
    """
    with contextlib.suppress(ImportError):
        library: Any = import_module("google_crc32c")
        return library.value(data)
    table = list(range(256))
    for _ in range(8):
        table = [(entry >> 1) ^ (0x82F63B78 if entry & 1 else 0) for entry in table]
    # The reflected polynomial of Castagnoli, byte by byte.
    register = 0xFFFFFFFF
    for byte in data:
        register = table[(register ^ byte) & 255] ^ (register >> 8)
    return register ^ 0xFFFFFFFF


def _check_lengths(header: ZarrHeader, name: str, file: StoredFile, held: Mapping[int, tuple[int, int]]) -> None:
    wrong = next(((offset, size) for offset, size in held.values() if size != header.chunk_bytes), None)
    if wrong is not None:
        raise file_error(
            file.path,
            f"a chunk of {header.chunks} has {wrong[1]} B, and takes {header.chunk_bytes}; restore the file",
            tensor=name,
            offset=wrong[0],
        )


def describe_zarr(folder: str, stored: Stored) -> NewArray:
    """What an array is, as `create_zarr` would make it again; its codec without the codec's settings."""
    version_3 = os.path.lexists(os.path.join(folder, "zarr.json"))
    path = os.path.join(folder, "zarr.json" if version_3 else ".zarray")
    text, _ = read_metadata(path)
    header = parse_zarr_header(text, path)
    if header is None:
        raise FileError(f"{quoted(path)} holds no numbers now; open the store again")
    fields = Fields.read(text, "the metadata of a zarr array", _CURE)
    attributes: dict[str, Any] = dict(fields.get("attributes", dict, default={}))
    names: Any = fields.data.get("dimension_names")
    if version_3:
        coded: Any = fields.data["codecs"]
        if header.index:
            coded = coded[0]["configuration"]["codecs"]
        ids = [codec if isinstance(codec, str) else codec["name"] for codec in coded]
        codec = next((each for each in ids if each in ("zstd", "gzip", "blosc")), None)
    else:
        if os.path.lexists(os.path.join(folder, ".zattrs")):
            beside, _ = read_metadata(os.path.join(folder, ".zattrs"))
            attributes = dict(Fields.read(beside, "the attributes of a zarr array", _CURE).data)
        # Where xarray keeps the names of dims in version 2.
        names = attributes.pop("_ARRAY_DIMENSIONS", None)
        packed = fields.data["compressor"]
        codec = None if packed is None else packed["id"]
    # A new array has the codec's own settings, whatever those of the old one were.
    shards = header.file_chunks if header.index else None
    fill: Any = fields.data.get("fill_value")
    named = tuple(cast("list[str | None]", names)) if isinstance(names, list) else ()
    return NewArray(stored.dtype, stored.shape, header.chunks, shards, codec, fill, attributes or None, named or None)


def write_zarr_group(folder: str, version: int, attributes: Mapping[str, Any] | None) -> None:
    """Makes a folder a group."""
    os.makedirs(folder, exist_ok=True)
    said: dict[str, Any] = {"zarr_format": version}
    if version == 3:
        said |= {"node_type": "group", "attributes": dict(attributes or {})}
    with open(os.path.join(folder, "zarr.json" if version == 3 else ".zgroup"), "w", encoding="utf-8") as file:
        json.dump(said, file)
    if version == 2 and attributes:
        write_zarr_attributes(folder, NewArray("", (), attributes=attributes))


def write_zarr_attributes(folder: str, new: NewArray) -> None:
    """Writes what version 2 keeps beside the metadata of an array or a group."""
    named = {} if new.dimension_names is None else {"_ARRAY_DIMENSIONS": list(new.dimension_names)}
    said = {**(new.attributes or {}), **named}
    if said:
        with open(os.path.join(folder, ".zattrs"), "w", encoding="utf-8") as file:
            json.dump(said, file)
