"""Files that commands read and write: compiled programs, told apart by their contents, and any output."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from reshard.errors import NotationError, ReshardError, quoted
from reshard.hlo.proto import ModuleProto
from reshard.types.input_files import open_input
from reshard.types.units import bytes_text, counted

MOST_BYTES = 1 << 30
"""The longest program that is read."""

_PART = 1 << 24
_MOST_LISTED = 20  # Programs of a folder, beside the one that is reported.

ARTIFACT = b"ML\xefR"  # The first bytes of a portable StableHLO artifact.
_HLO = re.compile(r"^HloModule ", re.MULTILINE)
_MLIR = re.compile(r"\bstablehlo\.|\bfunc\.func\b|\bsdy\.|^\s*module\b.*\{", re.MULTILINE)

_WANTED = (
    "give optimized HLO (compiled.as_text(), or a .txt of --xla_dump_to), StableHLO text "
    "(jitted.lower(...).as_text(debug_info=True)), or a portable StableHLO artifact"
)
_OR_LOG = "; or a log with XLA's warnings of involuntary full rematerialization, which TF_CPP_MIN_LOG_LEVEL=2 hides"


class ProgramText(NamedTuple):
    """A program as it stands in its file: text, or the bytes of a portable artifact."""

    content: str | bytes
    is_hlo: bool
    is_log: bool = False

    @property
    def text(self) -> str:
        """The text, or "" for an artifact or a proto."""
        return self.content if isinstance(self.content, str) else ""


def read_program(path: str, log_mark: str | None = None, *, protos: bool = False) -> ProgramText:
    """The program in a file (`-` is stdin): optimized HLO, StableHLO text, or a portable StableHLO artifact.

    With a `log_mark`, also a log: any text that has this mark. With `protos`, a serialized HloModuleProto is HLO too.
    A folder is one that `--xla_dump_to` filled, of which the program is read that receives most.
    Raises `NotationError` for any other content, and `ReshardError` for a file that cannot be read.
    """
    if os.path.isdir(path):
        path = find_heaviest_program(_list_dumped_programs(path))
    parts: list[bytes] = []
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else open_input(path) as file:
            while part := file.read(_PART):
                parts.append(part)
                if len(parts) > MOST_BYTES // _PART or not part.strip(
                    b"\0"
                ):  # /dev/zero has no end, a hole one far off.
                    long = f"more than {bytes_text(MOST_BYTES)}" if part.strip(b"\0") else "a part of null bytes"
                    raise NotationError(f"{path} has {long}, and no program does; {_WANTED}")
    except NotationError:
        raise
    except (OSError, ValueError) as error:
        raise ReshardError(f"cannot read {_name_file(path)}: {_explain_os_error(error)}; {_WANTED}") from None
    content = b"".join(parts)
    if content.startswith(ARTIFACT):
        return ProgramText(content, False)
    if protos and content.startswith(b"\n"):  # As an HloModuleProto does, whose first field is its name.
        with suppress(NotationError):
            if ModuleProto.decode(content).entry.name:
                return ProgramText(content, True)
    if log_mark is not None and log_mark.encode() in content:
        return ProgramText(content.decode(errors="replace"), False, True)
    wanted = _WANTED if log_mark is None else _WANTED + _OR_LOG
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise NotationError(f"{path} is binary, but not a portable StableHLO artifact; {wanted}") from None
    if _HLO.search(text):
        return ProgramText(text, True)
    if _MLIR.search(text):
        return ProgramText(text, False)
    what = "empty" if not text.strip() else f"not a program: {text.strip()[:60]!r}"
    raise NotationError(f"{path} is {what}; {wanted}")


def _list_dumped_programs(folder: str) -> list[str]:
    """The compiled programs in a folder of `--xla_dump_to`."""
    dumped = sorted(Path(folder).glob("*after_optimizations.txt"))
    if not dumped:
        raise ReshardError(
            f"{_name_file(folder)} has no file *after_optimizations.txt, as --xla_dump_to writes; {_WANTED}"
        )
    return [str(path) for path in dumped]


def find_heaviest_program(files: Sequence[str]) -> str:
    """The compiled program of which a device receives most; notes on stderr say which it is, and what others receive.

    Raises `ReshardError` for a file that is not optimized HLO, if there are several.
    """
    from reshard import hlo

    if len(files) == 1:
        return files[0]
    traffic: dict[str, hlo.Traffic] = {}
    for file in files:
        program = read_program(file)
        if not program.is_hlo:
            raise ReshardError(
                f"{_name_file(file)} is StableHLO: of several files, each has to be optimized HLO; give it alone"
            )
        traffic[file] = hlo.traffic(hlo.parse(program.text))
    heaviest, *others = sorted(traffic, key=lambda file: -traffic[file].received_bytes)
    what = f"the one of {len(traffic)} programs of which a device receives most"
    print(f"reshard: {_name_file(heaviest)}: {what}", file=sys.stderr)
    moving = [file for file in others if traffic[file].launches]
    for file in moving[:_MOST_LISTED]:
        received = f"{bytes_text(traffic[file].received_bytes)} received"
        collectives = counted(traffic[file].launches, "collective")
        print(f"reshard: {os.path.basename(file)}: {received}, {collectives}", file=sys.stderr)
    if more := moving[_MOST_LISTED:]:
        print(f"reshard: {counted(len(more), 'more program')} with collectives", file=sys.stderr)
    return heaviest


def write_output(path: str, content: str | bytes) -> None:
    """Writes a file (`-` is stdout, for text only); raises `ReshardError` if it cannot be written."""
    with _name_unwritable(path):
        if path == "-" and isinstance(content, str):
            sys.stdout.write(content)
        else:
            Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def check_output(path: str | None) -> None:
    """Raises what `write_output` would raise for a file that cannot be opened, before the work that it is to hold."""
    if path not in (None, "-"):
        with _name_unwritable(path):
            there = os.path.lexists(path)
            with open(path, "ab"):
                pass
            if not there:
                os.unlink(path)


@contextmanager
def _name_unwritable(path: str) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ReshardError(
            f"cannot write {_name_file(path)}: {_explain_os_error(error)}; give a file in a folder that is there and "
            f"may be written"
        ) from None


@contextmanager
def divert_library_output() -> Generator[None]:
    """Sends to stderr what libraries print to stdout meanwhile, past Python.

    HiGHS prints a line of its own while it solves some programs, which would make the JSON of a command unreadable.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        # Into a pipe, C's own buffer would be written only when the process ends.
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _name_file(path: str) -> str:
    """A file as errors name it; a name that cannot be printed is quoted."""
    return (path if path.isprintable() else quoted(path)) or "a file without a name"


def _explain_os_error(error: OSError | ValueError) -> str:
    """Why a file cannot be opened: what the system says, or that the name has a null byte or a lone surrogate."""
    return error.strerror or str(error) if isinstance(error, OSError) else f"no file can have this name ({error})"


def set_up_jax() -> None:
    """Sets up jax for a process that only compiles; call it before jax is imported. The user's own settings stay."""
    if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # Else the second of two commands at once fails.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would query a metadata server that does not exist.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # The report has what XLA warns of.
