"""The commands about arrays in files: `reshard files show`, `check` and `rechunk`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reshard.cli.option_groups import Command, argument
from reshard.errors import ReshardError, quoted

_SHOW_EXAMPLES = """\
examples:
  reshard files show llama/
  reshard files show --all model.safetensors
  reshard files show --json orbax/3
"""


@dataclass(frozen=True, kw_only=True)
class ShowFilesOptions:
    """The options of `reshard files show`."""

    path: str = argument("path", metavar="PATH", help="a checkpoint, in any format that the docs list")
    all: bool = argument("--all", action="store_true", help="every row, however many there are")
    json: bool = argument("--json", action="store_true", help="all of it as JSON: each piece, with its file and bytes")


def print_checkpoint(options: ShowFilesOptions) -> int:
    """Prints the tensors that are stored, by their metadata alone."""
    from reshard import files

    ckpt = files.open(options.path)
    print(ckpt.to_json() if options.json else ckpt.describe(None if options.all else 40))
    return 0


_CHECK_EXAMPLES = """\
examples:
  reshard files check llama/
  reshard files check --record orbax/3
"""


@dataclass(frozen=True, kw_only=True)
class CheckFilesOptions:
    """The options of `reshard files check`."""

    path: str = argument("path", metavar="PATH", help="a checkpoint, in any format that the docs list")
    record: bool = argument(
        "--record", action="store_true", help="write the checksums that the format has not, for later checks"
    )
    missing: str = argument(
        "--missing",
        metavar="HOW",
        default="refuse",
        choices=("refuse", "fill"),
        help="whether a chunk that is not there is a fault (refuse), or means the fill value (fill)",
    )


def print_file_check(options: CheckFilesOptions) -> int:
    """Prints what a check has found; 1 for faults."""
    from reshard import files

    # Faults are an answer, and so on stdout; what cannot be opened at all is an error.
    report = files.check(options.path, missing="fill" if options.missing == "fill" else "refuse", record=options.record)
    print(report)
    return 1 if report.faults else 0


_RECHUNK_EXAMPLES = """\
examples:
  reshard files rechunk era5.zarr series.zarr \\
      --chunks time=-1,x=8,y=8 --memory 2GiB
  reshard files rechunk in.h5 out.zarr --format zarr \\
      --chunks t2m:8760,8,8 --memory 1GiB
  reshard files rechunk in.zarr \\
      --chunks 4096,8,8 --memory 1GiB
"""


@dataclass(frozen=True, kw_only=True)
class RechunkOptions:
    """The options of `reshard files rechunk`."""

    source: str = argument("source", metavar="SRC", help="zarr, HDF5, .npy, or any other checkpoint")
    target: str | None = argument(
        "target", metavar="DST", nargs="?", help="what is made; without it the plan is printed and nothing is read"
    )
    chunks: Sequence[str] = argument(
        "--chunks",
        metavar="CHUNKS",
        action="append",
        required=True,
        help="sizes for each dim (4096,8,8), by names of dims (time=-1,x=8), or of one array (t2m:4096,8,8); "
        "-1 is all of a dim; may be given for several arrays",
    )
    memory: str = argument("--memory", metavar="SIZE", required=True, help="what each process may take, e.g. 2GiB")
    shards: Sequence[str] | None = argument(
        "--shards", metavar="CHUNKS", action="append", help="files of several chunks, of zarr 3, as --chunks"
    )
    format: str | None = argument(
        "--format", metavar="FORMAT", choices=("zarr", "zarr2", "hdf5", "npy"), help="zarr, zarr2, hdf5 or npy"
    )
    json: bool = argument("--json", action="store_true", help="the plan as JSON")


def run_rechunk(options: RechunkOptions) -> int:
    """Prints the plan, and rechunks by it if there is a target."""
    from reshard import files

    shards = None if options.shards is None else parse_chunks(options.shards)
    asked: dict[str, Any] = {"memory": options.memory, "format": options.format, "shards": shards}
    plan = files.plan_rechunk(options.source, chunks=parse_chunks(options.chunks), **asked)
    # Before it runs, so that who has waited for it has seen what it does.
    print(plan.to_json(2) if options.json else plan, flush=True)
    if options.target is not None:
        files.rechunk(options.source, options.target, chunks=parse_chunks(options.chunks), **asked)
    return 0


def parse_chunks(texts: Sequence[str]) -> Any:
    """Sizes for all arrays, or by names of dims or arrays, as `rechunk` takes them.

    >>> parse_chunks(["4096,8,8"]), parse_chunks(["time=-1,x=8"]), parse_chunks(["a:8,8", "b:4"])
    ((4096, 8, 8), {'time': -1, 'x': 8}, {'a': (8, 8), 'b': (4,)})
    """
    by_array: dict[str, Any] = {}
    for text in texts:
        name, _, sizes = text.rpartition(":")
        pairs = [part.rpartition("=") for part in sizes.split(",") if part.strip()]
        if not all(re.fullmatch(r"\s*(-1|[0-9]{1,18})\s*", size) for _, _, size in pairs):
            raise ReshardError(f"cannot read the chunks {quoted(text)}; write 4096,8,8 or time=-1,x=8 or t2m:4096,8,8")
        dims = {dim.strip(): int(size) for dim, _, size in pairs if dim.strip()}
        by_array[name] = dims if dims else tuple(int(size) for _, _, size in pairs)
    # What names no array is for all of them.
    return by_array[""] if list(by_array) == [""] else by_array


GROUP = "files", "what is stored in files, and whether it is intact"
"""The first word of these commands, and what they are about."""

COMMANDS = (
    Command(
        "files show",
        "the tensors in files, by their metadata alone",
        _SHOW_EXAMPLES,
        ShowFilesOptions,
        print_checkpoint,
    ),
    Command(
        "files check",
        "compare every checksum that is there with the bytes",
        _CHECK_EXAMPLES,
        CheckFilesOptions,
        print_file_check,
    ),
    Command(
        "files rechunk",
        "write stored arrays in other chunks, within memory",
        _RECHUNK_EXAMPLES,
        RechunkOptions,
        run_rechunk,
    ),
)
