"""Plans of all kinds to draw."""

from __future__ import annotations

from functools import cache
from typing import Any

import reshard as rs
from reshard.plans.plan import Plan
from reshard.types import Layout, Mesh

M42 = Mesh(x=4, y=2)
M222 = Mesh(x=2, y=2, z=2)
CASES = {
    "scalar": (Mesh(x=4), "f32[]", "f32[]", {}),
    "scalar to sum": (Mesh(x=4), "f32[] + sum{x}", "f32[]", {}),
    "one dim": (M42, "f32[{x}4]", "f32[{y}8]", {}),
    "two dims": (M42, "f32[{x}4, {y}8]", "f32[{y}8, {x}4]", {}),
    "three dims": (M42, "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]", {}),
    "three dims, two split": (Mesh(x=2, y=2), "f32[{x}4, 8, {y}4]", "f32[{y}4, 8, {x}4]", {}),
    "three dims split": (M222, "f32[{x}2, {y}2, {z}2]", "f32[4, {z}{x}1, {y}2]", {}),
    "four dims": (Mesh(a=2, b=2, c=2), "f32[{a}4, 2, {b}4, {c}4]", "f32[8, 2, {a}{c}2, {b}4]", {}),
    "uneven": (M42, "f32[{x}3/10, {y}5/9]", "f32[{y}5, {x}3/9]", {}),
    "slices of padding": (Mesh(x=3, y=4, z=4), "f32[{x}1/1, {y}1, {z}1]", "f32[{x}1/1, {z}1, {y}1]", {}),
    "empty pieces": (Mesh(x=4), "f32[{x}1/2, 4]", "f32[2, {x}1]", {}),
    "partial": (M42, "f32[8, 16] + sum{x}", "f32[{x}2, {y}8]", {}),
    "block-cyclic": (Mesh(x=2, y=2), "f64[4{x}2, 4{y}2]", "f64[{x}{y}4, 16]", {}),
    "strided": (Mesh(x=4), "f32[2{x}2]", "f32[{x}4]", {}),
    "replicated": (M42, "f32[16, 16]", "f32[{x}4, {y}8]", {}),
    "empty": (M42, "f32[0, {x}4]", "f32[0, {y}8]", {}),
    "identity": (M42, "f32[{x}4, 8]", "f32[{x}4, 8]", {}),
    "budget": (M42, "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]", {"budget": 4500}),
    "donated": (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {"budget": 256 + 64, "donate": True}),
    "other devices": (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}2, 8]", "f32[8, {x}2]", {}),
    "64 devices": (Mesh(x=8, y=8), "f32[{x}8, {y}8]", "f32[64, {x}{y}1]", {}),
}


@cache
def planned(name: str) -> Plan:
    mesh, source, target, options = CASES[name]
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)


@cache
def picture(name: str) -> Any:
    """The figure of a plan: all three pictures."""
    return planned(name).draw()
