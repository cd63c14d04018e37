"""`reshard load`: the plan of a load, printed before a byte is read.

Layouts come from rules: the first whose pattern fits the name of a tensor says how its dims are cut, and what no rule
names is replicated. In a file of rules they stand in the same order:

    [layouts]
    "*.o_proj.weight" = "P(None, 'tp')"
    "*_proj.weight" = "P('tp')"
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from reshard.cli.option_groups import Command, argument, network_argument
from reshard.cli.requests import read_pairs
from reshard.errors import ReshardError, quoted
from reshard.geometry.detect import as_layout
from reshard.types.input_files import open_input
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.whole import written

_EXAMPLES = """\
examples:
  reshard load --mesh rep=2,tp=2 llama/ \\
      --rule "*.o_proj.weight=P(None, 'tp')" \\
      --rule "*_proj.weight=P('tp')"
  reshard load --mesh tp=8 --processes 2 \\
      --rules tp.toml --budget 2GiB llama/
  reshard load --mesh tp=8 --names llama-to-vllm \\
      --size tp=8 --rules vllm.toml llama/
"""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of `reshard load`."""

    path: str = argument("path", metavar="PATH", help="a checkpoint, in any format that the docs list")
    mesh: str = argument("--mesh", metavar="AXES", required=True, help="axes of the mesh, first one major: rep=2,tp=4")
    processes: str | None = argument(
        "--processes", metavar="N", help="processes, each with as many devices in a row; one for each device"
    )
    rule: Sequence[str] | None = argument(
        "--rule",
        metavar="PATTERN=SPEC",
        action="append",
        help="how tensors of such names are cut: \"*.o_proj.weight=P(None, 'tp')\"; the first rule that fits",
    )
    rules: str | None = argument("--rules", metavar="FILE", help="a file of rules, in TOML: [layouts] of the same")
    names: str | None = argument("--names", metavar="TABLE", help="a table of names, whose targets are loaded")
    size: Sequence[str] | None = argument(
        "--size", metavar="NAME=N", action="append", help="a size that the table of names needs"
    )
    budget: str | None = argument("--budget", metavar="SIZE", help="most bytes of arrays in a process, e.g. 2GiB")
    read_size: str = argument(
        "--read-size", metavar="SIZE", default="1MiB", help="bytes that take as long to read as a request does: 1MiB"
    )
    wave: str | None = argument("--wave", metavar="SIZE", help="most bytes that a process stages at once")
    network: str | None = network_argument()
    json: bool = argument("--json", action="store_true", help="print the plan as JSON")


def print_load_plan(options: LoadOptions) -> int:
    """Prints who would read what."""
    from reshard import files
    from reshard.files.plan_load import list_target_types

    ckpt, mesh = files.open(options.path), Mesh.parse(options.mesh)
    rules = _read_rules(options)
    sizes = {name: int(text) for name, text in read_pairs("size", options.size)}
    targets: dict[str, Layout] = {}
    for name, (shape, dtype) in list_target_types(ckpt, options.names, sizes).items():
        # A spec may have fewer dims than a tensor: the rest of them are not cut.
        spec = next((spec for pattern, spec in rules if fnmatch.fnmatchcase(name, pattern)), "P()")
        try:
            targets[name] = as_layout(spec, mesh, shape, dtype)
        except ReshardError as error:
            raise ReshardError(f"{quoted(name)}: {error}; mend its rule, or write one before it") from None
    given = options.processes or ""
    processes = written(given) if given.isdecimal() else None
    if options.processes is not None and not processes:
        raise ReshardError(f"--processes {quoted(options.processes)}: give a number that divides that of devices")
    asked: dict[str, Any] = {"budget": options.budget, "read_size": options.read_size, "wave": options.wave}
    plan = files.plan_load(
        ckpt, targets, processes=processes, names=options.names, sizes=sizes, network=options.network, **asked
    )
    print(plan.to_json(2) if options.json else plan)
    return 0


def _read_rules(options: LoadOptions) -> list[tuple[str, str]]:
    """Patterns and specs, those of the call before those of its file."""
    rules: list[tuple[str, str]] = []
    for text in options.rule or ():
        pattern, equals, spec = text.partition("=")
        if not (pattern and equals and spec):
            raise ReshardError(f"--rule {quoted(text)}: write PATTERN=SPEC, such as \"*.weight=P('tp')\"")
        rules.append((pattern, spec))
    if options.rules is None:
        return rules
    try:
        with open_input(options.rules) as file:
            given: Any = tomllib.loads(file.read().decode()).get("layouts")
    except (OSError, ValueError) as error:  # Not TOML, or no text at all.
        raise ReshardError(f"--rules {quoted(options.rules)} cannot be read ({error}); give a file of TOML") from None
    # Specs are read with the tensors that they are of.
    layouts = cast("Mapping[str, object]", given) if isinstance(given, Mapping) else {"": None}
    if not all(isinstance(spec, str) for spec in layouts.values()):
        raise ReshardError(
            f"--rules {quoted(options.rules)}: give a table [layouts] of patterns and specs, such as "
            f'"*.weight" = "P(\'tp\')"'
        )
    return [*rules, *((pattern, str(spec)) for pattern, spec in layouts.items())]


COMMANDS = (
    Command("load", "plan a load of a checkpoint, without reading it", _EXAMPLES, LoadOptions, print_load_plan),
)
