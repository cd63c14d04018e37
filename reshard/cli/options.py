"""What commands share: groups of arguments as dataclasses, and how a command is added to the parser.

Each command is a `Command` with options of its own, a frozen dataclass whose fields are named as its arguments are.
`add_to` adds those arguments to a parser; a group that several commands share is a base class and adds its own
arguments first.

    Options
      ArrayOptions               --mesh, --shape, --dtype
        show.ShowOptions         LAYOUT, --limit
        MoveOptions              SOURCE, TARGET, --target-mesh, --budget, --network, --donate, --slack,
                                 --view, --size, --take, --into, --cast
          plan.PlanCommand       --json, --html, --explain
          ...
      doctor.DoctorOptions       FILE, --platform, ...

Options hold the text of a call. It is read when the command runs, so that every error is one of reshard's own.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    pass

NARROW = 60
"""Columns that a help and an answer need at most; lines that cannot be broken are as short."""

NOTATIONS = """\
notations of a layout:
  ours     f32[{y}8, 16, {x}4]   8 local, {y} held
  JAX      P('y', None, 'x')
  Shardy   [{"y"}, {}, {"x"}]
  DTensor  [Shard(2), Shard(0)]  one per axis of --mesh
  HLO      {devices=[2,1,4]<=[4,2]T(1,0)}  has a mesh
Ours has shape and dtype, which serve for the other one too.
Give the rest a --mesh, --shape and --dtype.
"""


@dataclass(frozen=True)
class Options:
    """The options of a command: none of their own."""

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments that fill these options."""


@dataclass(frozen=True, kw_only=True)
class ArrayOptions(Options):
    """What the text of a layout may leave out: the mesh, the global shape and the element type."""

    mesh: str | None
    shape: str | None
    dtype: str | None

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds `--mesh`, `--shape` and `--dtype`."""
        parser.add_argument("--mesh", metavar="AXES", help="axes of the mesh, first one major, e.g. x=4,y=2")
        shape = "global shape, where the layout does not say it: 16,16,16"
        parser.add_argument("--shape", metavar="SIZES", help=shape)
        dtype = "element type, where the layout does not say it: f32, bfloat16"
        parser.add_argument("--dtype", metavar="NAME", help=dtype)


@dataclass(frozen=True, kw_only=True)
class MoveOptions(ArrayOptions):
    """Two layouts, what to plan between them for, and the view, the parts and the cast that relate them.

    A command may also read the layouts `from_file`.
    """

    from_file: ClassVar[bool] = False
    source: str
    target: str
    target_mesh: str | None
    budget: str | None
    network: str | None
    donate: bool
    slack: str | None
    view: str | None = None
    size: list[str] | None = None
    take: list[str] | None = None
    into: list[str] | None = None
    cast: bool = False

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds `SOURCE` and `TARGET`, the arguments of an array, those of the planner, and those of a view."""
        count = "?" if cls.from_file else None
        now = "the layout now, in any of the notations below"
        parser.add_argument("source", metavar="SOURCE", nargs=count, help=now)
        parser.add_argument("target", metavar="TARGET", nargs=count, help="the layout wanted, in any of them")
        super().add_to(parser)
        parser.add_argument("--target-mesh", metavar="AXES", help="the mesh of TARGET, if it is another one")
        parser.add_argument("--budget", metavar="SIZE", help="most bytes live on a device, e.g. 64MiB, 0.5GiB or 4096")
        add_network(parser)
        parser.add_argument("--donate", action="store_true", help="the source may be given up once its data has moved")
        slack = "share of bytes that may be spent to save launches, for uneven layouts without a network; default 0.05"
        parser.add_argument("--slack", metavar="SHARE", help=slack)
        view = "which index becomes which, in einops' notation: '(three h) d -> three h d'"
        parser.add_argument("--view", metavar="TEXT", help=view)
        size = "the size of an atom of the view that does not follow from the shapes, e.g. three=3"
        parser.add_argument("--size", metavar="NAME=N", action="append", help=size)
        take = "move only this index or range of an atom of SOURCE, e.g. three=0 or h=0:8 (a dim's number without view)"
        parser.add_argument("--take", metavar="NAME=PART", action="append", help=take)
        into = "fill only this index or range of an atom of TARGET"
        parser.add_argument("--into", metavar="NAME=PART", action="append", help=into)
        parser.add_argument("--cast", action="store_true", help="cast, where the dtypes of the two layouts differ")


def add_network(parser: argparse.ArgumentParser) -> None:
    """Adds `--network`, which every command that plans understands in the same way."""
    network = "plan for least time on a preset or a JSON file; without NAME: list the presets"
    parser.add_argument("--network", metavar="NAME", nargs="?", action=_Network, help=network)


class _Network(argparse.Action):
    """Takes the name of a network; without one, prints the presets and exits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        """Stores the name."""
        if values is None:
            from reshard.synth.network import PRESETS

            print(f"{'GB/s':14} inside a domain  between domains")
            for name, network in PRESETS.items():
                links = (network.inner, network.outer)
                inner, outer = ("-" if link is None else f"{link.bandwidth / 1e9:.4g}" for link in links)
                print(f"{name:14} {inner:>15}  {outer:>15}")
            parser.exit()
        setattr(namespace, self.dest, values)


class Commands(Protocol):
    """What `ArgumentParser.add_subparsers` returns, as far as it is needed here."""

    @property
    def choices(self) -> Mapping[str, argparse.ArgumentParser]:
        """The parser of each command."""
        ...

    def add_parser(
        self, name: str, *, help: str, description: str, epilog: str, formatter_class: Any
    ) -> argparse.ArgumentParser:
        """Adds a command."""
        ...


def list_options(command: argparse.ArgumentParser) -> list[str]:
    """The options of a command, in the order of its help."""
    return [name for action in command._actions for name in action.option_strings]  # pyright: ignore[reportPrivateUsage]


class Command(NamedTuple):
    """A command: `options` adds its arguments and holds their values, `run` does the work and returns the exit code."""

    name: str
    summary: str
    epilog: str
    options: type[Options]
    run: Callable[[Any], int]


@dataclass(frozen=True)
class CommandCall:
    """A command with its options: calling it runs the command and returns the exit code."""

    run: Callable[[Any], int]
    options: Options

    def __call__(self) -> int:
        """Runs the command."""
        return self.run(self.options)


def add_command(commands: Commands, command: Command) -> None:
    """Adds a command to a parser. The parsed arguments have its call as `call`."""
    name, summary, epilog, kind, run = command
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(f"{summary[0].upper()}{summary[1:]}.", NARROW),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind.add_to(parser)
    verbose = "say on stderr what is done; twice: more of it"
    parser.add_argument("-v", "--verbose", action="count", default=0, help=verbose)

    # Layouts, sizes and names stay texts until the command runs, so that what is wrong with them is an error of the
    # package, with its advice, and not one of argparse.
    def call(parsed: argparse.Namespace) -> CommandCall:
        return CommandCall(run, kind(**{field.name: getattr(parsed, field.name) for field in fields(kind)}))

    parser.set_defaults(call=call)
