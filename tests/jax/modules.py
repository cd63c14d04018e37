"""Small StableHLO modules with Shardy shardings, as text."""

from __future__ import annotations

import re

from reshard.jax.pass_report import PassReport

MESH = 'sdy.mesh @mesh = <["x"=4, "y"=2]>'
TYPE = "tensor<16x16xf32>"
COLUMNS, ROWS, SWAPPED, SPLIT = '[{}, {"y", "x"}]', '[{"y", "x"}, {}]', '[{"y"}, {"x"}]', '[{}, {"x"}]'


def module(body: str, source: str = '[{"x"}, {"y"}]', mesh: str = MESH) -> str:
    """A program with one argument `%a` and the result `%r`."""
    return f"""{mesh}
      func.func public @main(%a: {TYPE} {{sdy.sharding = #sdy.sharding<@mesh, {source}>}}) -> {TYPE} {{
        {body}
        return %r : {TYPE}
      }}"""


def constraint(target: str, value: str = "%a", result: str = "%r") -> str:
    """A sharding constraint as the user writes it."""
    return f"{result} = sdy.sharding_constraint {value} <@mesh, {target}> : {TYPE}"


def uneven(first: str, second: str, size: int) -> str:
    """A move between uneven tiles, of an array that comes and goes replicated."""
    steps = constraint(first, "%a", "%b"), constraint(second, "%b", "%c"), constraint("[{}, {}]", "%c")
    return module("\n".join(steps), "[{}, {}]").replace("16x16", f"{size}x16")


def layouts(report: PassReport) -> list[tuple[str, str, bool]]:
    """Source, target and whether it was taken, of each reshard of a report."""
    return [(str(r.source), str(r.target), r.taken) for r in report.reshards]


def count(text: str, name: str) -> int:
    """How often a whole word is in a text."""
    return len(re.findall(rf"\b{name}\b", text))
