"""What the playground asks: the text of a call's options in, the parts of a page out; the standard library alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from reshard.cli.options import MoveOptions
from reshard.cli.requests import PlanRequest, plan_for_options
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
    try:
        return _write_parts(plan_for_options(_read_fields(given)), given)
    except ReshardError as error:
        return {"error": str(error)}


def _read_fields(given: Mapping[str, str | None]) -> MoveOptions:
    return MoveOptions(
        mesh=given["mesh"], shape=given["shape"], dtype=given["dtype"], source=given["source"] or "",
        target=given["target"] or "", target_mesh=given["target_mesh"], budget=given["budget"],
        network=given["network"], donate=given["donate"] is not None, slack=None,
    )  # fmt: skip


def _write_parts(request: PlanRequest, given: Mapping[str, str | None]) -> dict[str, str]:
    plan, budget = request.plan, given["budget"]
    # The same request in a shell.
    words = ["reshard plan"]
    for name, value in given.items():
        if value is not None and name not in ("source", "target"):
            words.append(f"--{name.replace('_', '-')}" + ("" if name == "donate" else f" {shlex.quote(value)}"))
    return {
        "sums": sums_of(plan, given["network"]),
        "steps": steps_of(plan, given["network"]),
        "tiles": picture_of("tiles", plan),
        "traffic": picture_of("traffic", plan),
        "memory": picture_of("memory", plan, None if budget is None else parse_bytes(budget)),
        "size": size_text(request.source, request.target),
        "command": " ".join([*words, shlex.quote(given["source"] or ""), shlex.quote(given["target"] or "")]),
    }
