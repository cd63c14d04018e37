"""The commands about arrays in files: `reshard files show` and `check`."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.cli.option_groups import Command, argument

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
)
