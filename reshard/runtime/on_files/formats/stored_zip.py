"""Zip archives inside files, whose entries are stored as they are: where each entry's bytes lie, and their CRC-32.

    torch writes every tensor as one zip of a few entries, many of them in a file, one behind the other:

    local header, name, padding | entry | ... | central directory | (zip64 end) | end of central directory

Two reads show all of it, since the directory is at the end and the first entries at the start: thousands of zips are
opened so. Sizes and CRC-32 stand in the directory alone, as torch writes entries before it knows them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from reshard.errors import FileError, quoted
from reshard.runtime.on_files.formats.metadata_files import OpenedFile, file_error

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
