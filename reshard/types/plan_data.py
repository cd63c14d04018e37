"""Plans as plain data of JSON: the lines of a step, and the checks of what was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from reshard.errors import PlanError, quoted
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.rules.cost import StepMode
from reshard.types.step import Step
from reshard.types.view import View
from reshard.types.whole import whole

_MOST_INDENT = 64

FORMAT = 1
"""The format of plans in JSON. A reader of another one cannot tell what the fields mean, so it refuses."""


def checked_indent(indent: object) -> int | None:
    """The spaces by which JSON is indented, None for a single line; raises `PlanError` for anything else.

    >>> checked_indent(2), checked_indent(None)
    (2, None)
    """
    spaces = None if indent is None else whole(indent, most=_MOST_INDENT)
    if spaces is None and indent is not None:
        raise PlanError(f"indent {quoted(indent)}: give a whole number from 0 to {_MOST_INDENT}, or None")
    return spaces


def compare(given: Mapping[str, Any], made: Mapping[str, Any], what: str) -> None:
    """Refuses JSON whose figures differ from those of its steps.

    >>> compare({"launches": 1}, {"launches": 1, "steps": []}, "the plan")
    """
    for name, value in made.items():
        if name != "steps" and given.get(name, value) != value:
            raise PlanError(
                f"the JSON says {name} {quoted(given[name])} of {what}, but its steps make {quoted(value)}; plan "
                f"it again"
            )


def check_format(number: object) -> None:
    """Refuses a format that is not that of this version."""
    if number != FORMAT or isinstance(number, bool):
        raise PlanError(
            f"this plan in JSON has format {quoted(number)}, and this version of reshard reads format {FORMAT}; read "
            f"it with the version that wrote it, or plan again"
        )


def step_data(step: Step) -> dict[str, Any]:
    """The lines of a `Step`; only one that has a view writes that."""
    return {
        "kind": step.kind,
        "operand": str(step.operand),
        "result": str(step.result),
        "mesh": step.result.mesh.to_dict(),
        "chunk": step.mode.chunk,
        "in_place": step.mode.in_place,
        "parts": step.mode.parts,
        **({"relay": True} if step.mode.relay else {}),
        "received_bytes": step.received_bytes,
        "live_bytes": step.live_bytes,
        "launches": step.launches,
        "seconds": step.seconds,
        **view_data(step.mode.view),
    }


def step_spec(step: Mapping[str, Any]) -> tuple[str, Layout, StepMode]:
    """The kind, the result and the mode of a step's lines."""
    options = (step.get("chunk"), step.get("in_place", False), step.get("parts", 1), step.get("relay", False))
    mode = StepMode(*options, read_view(step))
    return cast(str, step["kind"]), Layout.parse(step["result"], Mesh.from_dict(step["mesh"])), mode


def view_data(view: View | None) -> dict[str, Any]:
    """The line of a view; none without one."""
    return {} if view is None else {"view": view.to_dict()}


def read_view(data: Mapping[str, Any]) -> View | None:
    """The view of a plan or a step, None where there is none."""
    return View.from_dict(data["view"]) if data.get("view") is not None else None
