"""What commands share: options as dataclasses whose fields are arguments, and what a command is.

    ArrayOptions               --mesh, --shape, --dtype
      ShowOptions              LAYOUT, --limit
      MoveOptions              SOURCE, TARGET, --target-mesh, --budget, --network, --donate, --slack,
                               --view, --size, --take, --into, --cast
        PlanCommand            --batch, --tree, --json, --html, --explain
        ...
    DoctorOptions              FILE, --platform, ...

A command is a `Command` with options of its own: a frozen dataclass, each field of which `argument` declares in
argparse's words. Groups that several commands share are base classes. Options hold the text of a call. It is read when
the command runs, so that every error is one of reshard's own, with its advice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

NARROW = 60
"""Columns that a help and an answer need at most; lines that cannot be broken are as short."""

NOTATIONS = """\
notations of a layout:
  reshard  f32[{y}8, 16, {x}4]   8 local, {y} held
  JAX      P('y', None, 'x')
  Shardy   [{"y"}, {}, {"x"}]
  DTensor  [Shard(2), Shard(0)]  one per axis of --mesh
  HLO      {devices=[2,1,4]<=[4,2]T(1,0)}  has a mesh
The first has shape and dtype, which serve the other too.
Give the rest a --mesh, --shape and --dtype.
"""


def argument(*names: str, help: str, **how: Any) -> Any:
    """A field of options that an argument fills: its names and what else `ArgumentParser.add_argument` takes.

    The field has the value that argparse gives an option that is left out; what has no dashes must be given.
    """
    if not names[0].startswith("-"):
        return field(metadata={"names": names, "help": help, **how})
    absent = how.get("default", False if how.get("action") == "store_true" else None)
    return field(default=absent, metadata={"names": names, "help": help, **how})


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


def network_argument() -> Any:
    """`--network`, which every command that plans understands in the same way."""
    what = "plan for least time on a preset or a JSON file; without NAME: list the presets"
    return argument("--network", metavar="NAME", nargs="?", action=_Network, help=what)


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    """What the text of a layout may leave out: the mesh, the global shape and the element type."""

    mesh: str | None = argument("-m", "--mesh", metavar="AXES", help="axes of the mesh, first one major, e.g. x=4,y=2")
    shape: str | None = argument(
        "--shape", metavar="SIZES", help="global shape, where the layout does not say it: 16,16,16"
    )
    dtype: str | None = argument(
        "--dtype", metavar="NAME", help="element type, where the layout does not say it: f32, bfloat16"
    )


@dataclass(frozen=True, kw_only=True)
class MoveOptions(ArrayOptions):
    """Two layouts, what to plan between them for, and the view, the parts and the cast that relate them."""

    source: str = argument("source", metavar="SOURCE", help="the layout now, in any of the notations below")
    target: str = argument("target", metavar="TARGET", help="the layout wanted, in any of them")
    target_mesh: str | None = argument("--target-mesh", metavar="AXES", help="the mesh of TARGET, if it is another one")
    budget: str | None = argument(
        "--budget", metavar="SIZE", help="most bytes live on a device, e.g. 64MiB, 0.5GiB or 4096"
    )
    network: str | None = network_argument()
    donate: bool = argument("--donate", action="store_true", help="the source may be given up once its data has moved")
    slack: str | None = argument(
        "--slack",
        metavar="SHARE",
        help="share of bytes that may save launches, of uneven layouts or to other devices, without a network; 0.05",
    )
    view: str | None = argument(
        "--view", metavar="TEXT", help="which index becomes which, in einops' notation: '(three h) d -> three h d'"
    )
    size: Sequence[str] | None = argument(
        "--size",
        metavar="NAME=N",
        action="append",
        help="the size of an atom of the view that does not follow from the shapes, e.g. three=3",
    )
    take: Sequence[str] | None = argument(
        "--take",
        metavar="NAME=PART",
        action="append",
        help="move only this index or range of an atom of SOURCE, e.g. three=0 or h=0:8 (a dim's number without view)",
    )
    into: Sequence[str] | None = argument(
        "--into", metavar="NAME=PART", action="append", help="fill only this index or range of an atom of TARGET"
    )
    cast: bool = argument("--cast", action="store_true", help="cast, where the dtypes of the two layouts differ")


class Command(NamedTuple):
    """A command: the fields of `options` are its arguments, `run` does the work and returns the exit code."""

    name: str
    summary: str
    epilog: str
    options: type[Any]
    run: Callable[[Any], int]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments to a parser. What it parses has the call of the command as `call`."""
        for each in fields(self.options):
            parser.add_argument(*each.metadata["names"], **{k: v for k, v in each.metadata.items() if k != "names"})
        verbose = "say on stderr what is done; twice: more of it"
        parser.add_argument("-v", "--verbose", action="count", default=0, help=verbose)
        parser.set_defaults(call=self.bind)

    def bind(self, parsed: argparse.Namespace) -> Callable[[], int]:
        """The call of the command with these arguments."""
        return partial(
            self.run, self.options(**{each.name: getattr(parsed, each.name) for each in fields(self.options)})
        )
