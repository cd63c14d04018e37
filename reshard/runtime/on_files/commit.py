"""One commit: files that several processes write become the checkpoint at a path in one step, or not at all.

    .model-00001-of-00002-5d.safetensors-5d.part     1  every process writes its spans, fsync
    .reshard.json-5d.part                            2  the first process has the sums of all, and lists the files
    model-00001-of-00002-5d.safetensors              3  renamed; nobody reads it before the index names it
    reshard.json                                     4  replaced: lists the old save and the new one
    model.safetensors.index.json                     5  replaced: from here on the new save is the one that is there
    reshard.json                                     6  replaced: the new save alone; the files of the old one go

Killed before 5, the old checkpoint is whole, and after it the new one. What a killed save leaves, under names that
carry its id, is removed by the next one. Where a format has no index with names of its own choice (zarr, Orbax), all of
its files are in a folder `.NAME-5d.part`, which takes the place of the old folder in one exchange of both names.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np

from reshard import errors
from reshard.errors import FileError, ReshardError, quoted, shortened
from reshard.runtime.on_files.sidecar import (
    SIDECAR,
    BlockSums,
    ChunkSums,
    FileSums,
    SavedSums,
    list_blocks,
    read_sidecar,
    write_sums,
)

_MOST_BUFFERS = 1024
"""Buffers of one `pwritev`."""

_PART = re.compile(r"\..+-[0-9a-f]{16}\.part")


class Processes(Protocol):
    """The processes that save together: who this one is, and how all tell each other something.

    `gather` returns what each process gives, in their order, and returns on none before all have called it.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, mine: str) -> list[str]: ...


class OneProcess:
    """A process that saves by itself."""

    rank = 0
    size = 1

    def gather(self, mine: str) -> list[str]:
        """What this process gives."""
        return [mine]


def raise_together(processes: Processes, error: Exception | None) -> None:
    """Returns on all processes if none has an error; else all raise that of the first process that has one."""
    given = processes.gather("" if error is None else f"{type(error).__name__}:{error}")
    failed = [(rank, *text.split(":", 1)) for rank, text in enumerate(given) if text]
    if not failed:
        return
    if error is not None and len(failed) == processes.size and len({each[1:] for each in failed}) == 1:
        raise error if isinstance(error, ReshardError) else FileError(shortened(str(error), 2000)) from error
    rank, kind, text = failed[0]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    known = getattr(errors, kind, None)
    # An error that is not one of this package's, or that wants more than a text.
    as_kind = known if isinstance(known, type) and known.__init__ is ReshardError.__init__ else FileError
    raise as_kind(f"process {rank}{more}: {text}") from error


class NewFile(NamedTuple):
    """A file that a save writes: its name in the folder, its bytes, and where its blocks of sums begin anew."""

    name: str
    size: int
    parts: tuple[int, ...] = (0,)


@dataclass
class PartFiles:
    """The files of a save of which this process writes spans, under the names of parts.

    `index` is the number of the file whose renaming is the commit.
    """

    folder: Path
    save: str
    files: Sequence[NewFile]
    index: int
    sums: BlockSums = field(init=False)
    _opened: dict[int, int] = field(init=False, default_factory=dict[int, int])

    def __post_init__(self) -> None:
        starts = {at: np.append(list_blocks(of.size, of.parts), of.size) for at, of in enumerate(self.files)}
        self.sums = BlockSums(starts)

    def part_path(self, file: int) -> Path:
        """Where a file is until the commit."""
        return self.folder / f".{self.files[file].name}-{self.save}.part"

    def write(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Writes buffers that follow each other in a file, and adds their sums; raises `FileError`."""
        try:
            if file not in self._opened:
                self._opened[file] = os.open(self.part_path(file), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            at = offset
            # While the bytes are in the caches, before the system copies them.
            for buffer in buffers:
                self.sums.add(file, at, buffer)
                at += buffer.nbytes
            write_fully(self._opened[file], offset, buffers)
        except OSError as error:
            raise self.error_of(file, f"bytes {offset} on cannot be written", error) from None

    def sync(self) -> None:
        """Brings what this process has written to disk; raises `FileError`."""
        # Some file systems tell of a full disk here only.
        opened, self._opened = self._opened, {}
        failed: tuple[int, OSError] | None = None
        for file, descriptor in opened.items():
            try:
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:  # The others are closed all the same.
                failed = file, error
        if failed is not None:
            raise self.error_of(failed[0], "it cannot be brought to disk", failed[1]) from None

    def error_of(self, file: int, what: str, error: OSError) -> FileError:
        """The error of a file that cannot be written."""
        advice = "free some space or save elsewhere" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "save again"
        return FileError(
            f"{quoted(str(self.folder / self.files[file].name))}: {what}: {error.strerror or error}; what was saved "
            f"there before is as it was; {advice}"
        )

    def discard(self) -> None:
        """Closes and removes the parts."""
        for descriptor in self._opened.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._opened.clear()
        for file in range(len(self.files)):
            with contextlib.suppress(OSError):
                self.part_path(file).unlink(missing_ok=True)


def write_fully(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Writes buffers one behind another; a call may write less than it is given."""
    left = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    while left:
        # Interrupted calls are made again by Python itself.
        written = os.pwritev(descriptor, left[:_MOST_BUFFERS], offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def sync_folder(folder: Path) -> None:
    """Brings a folder's list of files to disk, where the file system can do that: some network file systems cannot."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def sync_files(path: Path, processes: Processes) -> None:
    """Brings this process's share of the files below a path to disk, several at a time, or what it wrote of a file.

    All processes call it. Their libraries sync nothing, so that each file is synced once. Raises `OSError`.
    """
    listed = sorted((Path(folder), names) for folder, _, names in os.walk(path))
    files = [folder / name for folder, names in listed for name in sorted(names)]
    share = files[processes.rank :: processes.size] if path.is_dir() else [path]

    def sync_file(file: Path) -> None:
        # A database of several writers removes what it has no use for when it finds the time.
        with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
            os.fsync(opened.fileno())

    # A disk syncs several at once in hardly more time than one.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync_file, share))
    for folder, _ in listed if processes.rank == 0 else ():
        sync_folder(folder)


def commit_files(parts: PartFiles, sidecar: Path, processes: Processes, error: Exception | None = None) -> None:
    """Makes what all processes have written the checkpoint that is there, or raises on all; `error` is this one's own.

    The old checkpoint is in place where an error is raised.
    """
    try:
        if error is None:
            try:
                parts.sync()
            except FileError as caught:
                error = caught
        raise_together(processes, error)
        found = [[*at, value] for at, value in parts.sums.found.items()]
        gathered = [json.loads(each) for each in processes.gather(json.dumps([found, parts.sums.partials()]))]
        if processes.rank == 0:
            try:
                # This process's own are in its `sums` already.
                parts.sums.merge(each[1] for each in gathered[1:])
                parts.sums.found.update({(file, block): value for each in gathered for file, block, value in each[0]})
                publish_files(parts, sidecar)
            except (FileError, OSError) as caught:
                error = caught
        raise_together(processes, error)
    except BaseException:
        # Those of other processes under these names go as well: all of them fail together.
        parts.discard()
        raise


def publish_files(parts: PartFiles, sidecar: Path, tensors: Mapping[str, ChunkSums] | None = None) -> None:
    """Makes parts that are on disk the checkpoint of their folder; nothing is raised once they are.

    `tensors` has the sums of chunks that only a library finds in them.
    """
    sums: dict[str, FileSums] = {}
    for at, file in enumerate(parts.files):
        starts = list_blocks(file.size, file.parts)
        missing = [block for block in range(len(starts)) if (at, block) not in parts.sums.found]
        if missing:
            raise FileError(
                f"{quoted(file.name)}: block {missing[0]} of {len(starts)} has not been written by any process"
            )
        # In the order of the file.
        found = [parts.sums.found[at, block] for block in range(len(starts))]
        sums[file.name] = FileSums(file.size, starts, np.array(found, np.uint32))
    at_commit = parts.folder / parts.files[parts.index].name
    new = SavedSums(
        parts.save,
        sums,
        tensors or {},
        index=at_commit.name,
        changed_ns=parts.part_path(parts.index).stat().st_mtime_ns,
    )
    try:
        old = read_sidecar(sidecar)
    except FileError:
        old = ()
    listed = sidecar.with_name(f".{sidecar.name}-{parts.save}.part")
    renamed: list[Path] = []
    # Each step leaves what the next save can clear up, and what a reader finds is one save throughout.
    try:
        with create_synced_file(listed) as file:
            file.write(write_sums([new, *old]))
        for at, file in enumerate(parts.files):
            if at != parts.index:
                parts.part_path(at).replace(parts.folder / file.name)
                renamed.append(parts.folder / file.name)
        sync_folder(parts.folder)
        # A first save has none to replace: readers of whatever else is there must not find a sidecar that denies it.
        if old:
            listed.replace(sidecar)
        parts.part_path(parts.index).replace(at_commit)
        sync_folder(parts.folder)
    except OSError as error:
        for path in (*renamed, listed):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise parts.error_of(parts.index, "the save cannot be made the one that is there", error) from None
    # The save is done. What follows takes away what nobody needs, and the next save does it if this one cannot. The
    # sidecar lists what is to go until it has gone: or a kill here would leave files that nothing names.
    with contextlib.suppress(OSError):
        if not old:
            listed.replace(sidecar)
        remove_remains(parts.folder, sidecar, new, old)
        if old:
            with create_synced_file(listed) as file:
                file.write(write_sums([new]))
            listed.replace(sidecar)
        sync_folder(parts.folder)


def remove_remains(folder: Path, sidecar: Path, kept: SavedSums | None, old: Sequence[SavedSums]) -> None:
    """Removes the parts of killed saves; once a new save is `kept`, also the files of others that it does not have."""
    with contextlib.suppress(OSError):
        # Sidecars of saves that were killed while they renamed say which files these had.
        lists = [path for path in folder.glob(f".{sidecar.name}-*.part") if _PART.fullmatch(path.name)]
        for path in lists if kept is not None else ():
            with contextlib.suppress(FileError):
                old = [*old, *read_sidecar(path)]
        for name in {name for saved in old for name in saved.files} if kept is not None else ():
            # Only names that carry the id of their save: an index has the same name in all of them.
            owners = [saved for saved in old if name in saved.files and saved.save in name]
            if owners and kept is not None and name not in kept.files and os.path.basename(name) == name:
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
        alone = sidecar.name.removesuffix(f".{SIDECAR}")
        prefixes = ("",) if sidecar.name == SIDECAR else (f".{alone}-", f".{sidecar.name}-")
        for path in folder.iterdir():
            if (
                _PART.fullmatch(path.name)
                and path.name.startswith(prefixes)
                and (kept is not None or path not in lists)
            ):
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def create_synced_file(path: Path) -> Generator[IO[bytes]]:
    """A new file, which is on disk once the `with` block has ended; it is removed again if anything raises there."""
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def replace_folder(part: Path, path: Path) -> None:
    """Puts a folder in the place of another, or of nothing, in one step; the other one is removed.

    Where the system cannot exchange two names (some network file systems), there is none at `path` for a moment.
    """
    if not path.exists() or not any(path.iterdir()):
        part.replace(path)
        sync_folder(path.parent)
        return
    old = part
    if not _exchange_names(part, path):
        old = part.with_name(part.name.replace(".part", "00.part")[-200:])
        path.replace(old)
        part.replace(path)
    # The new one is there for good before the old one goes.
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange_names(one: Path, other: Path) -> bool:
    """Exchanges what two paths name, in one step; False where that cannot be done."""
    # Python has no name for this call; Linux has it since 3.15.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, as Linux has them.
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))
