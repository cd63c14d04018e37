"""Plans of the same form at other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from reshard.errors import PlanError
from reshard.proofs.symbolic import Form
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.plan import Plan, StepSpec, chain


def instance(plan: Plan, form: Form, sizes: Mapping[str, int]) -> Plan:
    """The same steps with other sizes for the names of the form; the chunks of an exchange grow with its messages.

    Raises `PlanError` for names that the form does not have, and for sizes below 1.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> plan = rs.plan(rs.Layout.parse("f32[{x}4, 16]", mesh), rs.Layout.parse("f32[16, {x}4]", mesh))
    >>> print(instance(plan, rs.prove(plan).form, {"n0": 7}).target)
    f32[28, {x}4]
    """
    wrong = {name: size for name, size in sizes.items() if name not in form.sizes or size < 1}
    if wrong:
        names = ", ".join(form.sizes) or "none"
        raise PlanError(f"{wrong} are not sizes of this form: its names are {names}, and sizes are 1 or more")
    at = {**form.sizes, **sizes}
    growth = math.prod(at.values()), form.unit
    specs: list[StepSpec] = []
    for step in plan.steps:
        chunk = None if step.mode.chunk is None else step.mode.chunk * growth[0] // growth[1]
        specs.append(StepSpec(step.kind, resized(step.result, form, at), step.mode._replace(chunk=chunk)))
    return chain(resized(plan.source, form, at), resized(plan.target, form, at), specs, plan.donate)


def resized(layout: Layout, form: Form, sizes: Mapping[str, int]) -> Layout:
    """A layout with other sizes for the names of a form."""
    dims = tuple(_resized(at, dim, form, sizes) for at, dim in enumerate(layout.dims))
    return Layout(layout.mesh, dims, layout.dtype, layout.reduction, layout.partial)


def _resized(at: int, dim: Dim, form: Form, sizes: Mapping[str, int]) -> Dim:
    """A dim whose local digits are resized by the names of the form's digits that they contain."""
    if at in form.fixed:
        return dim
    digits: list[Digit] = []
    low = 1
    for radix, axis in reversed(dim.digits):
        inside = [name for (d, place), name in form.names.items() if d == at and low <= place < low * radix]
        size = radix
        for name in inside if axis is None else ():
            size = size // form.sizes[name] * sizes[name]
        digits.insert(0, Digit(size, axis))
        low *= radix
    return Dim(tuple(digits), math.prod(d.radix for d in digits))
