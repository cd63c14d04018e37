"""The command about arrays in files: `reshard files show` and `check`."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.cli.option_groups import Command, argument

_FILES_EXAMPLES = """\
examples:
  reshard files show llama/
  reshard files check llama/
  reshard files check --record orbax/3
"""


@dataclass(frozen=True, kw_only=True)
class FilesOptions:
    """The options of `reshard files`."""

    action: str = argument(
        "action",
        metavar="ACTION",
        choices=("show", "check"),
        help="show: the tensors, from metadata alone; check: compare every checksum that is there",
    )
    path: str = argument("path", metavar="PATH", help="a checkpoint, in any format that the docs list")
    record: bool = argument(
        "--record", action="store_true", help="check: write the checksums that the format has not, for later checks"
    )
    missing: str = argument(
        "--missing",
        metavar="HOW",
        default="refuse",
        choices=("refuse", "fill"),
        help="check: whether a chunk that is not there is a fault (refuse), or means the fill value (fill)",
    )


def run_files_command(options: FilesOptions) -> int:
    """Prints what is stored, or what a check has found; 1 for faults."""
    from reshard import files

    if options.action == "show":
        print(files.open(options.path))
        return 0
    # Faults are an answer, and so on stdout; what cannot be opened at all is an error.
    report = files.check(options.path, missing="fill" if options.missing == "fill" else "refuse", record=options.record)
    print(report)
    return 1 if report.faults else 0


COMMANDS = (
    Command(
        "files", "what is stored in files, and whether it is intact", _FILES_EXAMPLES, FilesOptions, run_files_command
    ),
)
