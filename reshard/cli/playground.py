"""What the playground asks: the text of a call's options in, the parts of a page out; the standard library alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from reshard.cli.option_groups import MoveOptions
from reshard.cli.requests import plan_for_options
from reshard.draw.plan_page import picture_of, steps_of, sums_of
from reshard.errors import ReshardError
from reshard.show.plan_table import size_text
from reshard.types.units import parse_bytes

FIELDS = ("mesh", "source", "target", "target_mesh", "shape", "dtype", "budget", "network", "donate")
"""What a state of the playground consists of; a field that is empty or absent is an option that is not given."""


def answer_fields(fields: Mapping[str, str]) -> dict[str, str]:
    """The plan that the fields ask for as HTML, part by part, and the command that prints it; or what is wrong.

    >>> same = {"mesh": "x=2", "source": "f32[{x}4]", "target": "f32[8]"}
    >>> sorted(answer_fields(same)), answer_fields(same)["command"]
    (['command', 'memory', 'size', 'steps', 'sums', 'tiles', 'traffic'], "reshard plan --mesh x=2 'f32[{x}4]' 'f32[8]'")
    >>> answer_fields(same | {"budget": "1"})["error"][-31:]
    'the smallest that works is 48 B'
    """
    given = {name: fields.get(name, "").strip() or None for name in FIELDS}
    if missing := [name for name in ("mesh", "source", "target") if given[name] is None]:
        return {"error": f"fill in {' and '.join(missing)}"}
    # An option has the name of its field; one that is not given keeps its own default.
    options = {name: value for name, value in given.items() if value is not None}
    asked: dict[str, Any] = {**options, "donate": "donate" in options}
    words = ["reshard plan"]  # The same request in a shell.
    for name, value in options.items():
        if name not in ("source", "target"):
            words.append(f"--{name.replace('_', '-')}" + ("" if name == "donate" else f" {shlex.quote(value)}"))
    try:
        source, target, plan = plan_for_options(MoveOptions(**asked))
        return {
            "sums": sums_of(plan, given["network"]),
            "steps": steps_of(plan, given["network"]),
            "tiles": picture_of("tiles", plan),
            "traffic": picture_of("traffic", plan),
            "memory": picture_of("memory", plan, None if "budget" not in options else parse_bytes(options["budget"])),
            "size": size_text(source, target),
            "command": " ".join([*words, shlex.quote(options["source"]), shlex.quote(options["target"])]),
        }
    except ReshardError as error:
        return {"error": str(error)}
