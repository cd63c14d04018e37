"""Plans of the same form at other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from reshard.errors import PlanError
from reshard.proofs.symbolic import Form
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.plan import Plan, StepSpec, chain


def instance(plan: Plan, form: Form, sizes: Mapping[str, int]) -> Plan:
    """The plan with other sizes for the names of its form; a chunk grows with the messages.

    Raises `PlanError` for names that the form does not have, and sizes below 1.
    """
    wrong = {name: size for name, size in sizes.items() if name not in form.sizes or size < 1}
    if wrong:
        names = ", ".join(form.sizes) or "none"
        raise PlanError(f"{wrong} are no sizes of this form: its names are {names}, and sizes are 1 or more")
    at = {**form.sizes, **sizes}
    more = math.prod(at.values()), form.unit
    moves = [
        StepSpec(
            step.kind,
            resized(step.result, form, at),
            step.mode if step.mode.chunk is None else step.mode._replace(chunk=step.mode.chunk * more[0] // more[1]),
        )
        for step in plan.steps
    ]
    return chain(resized(plan.source, form, at), resized(plan.target, form, at), moves, plan.donate)


def resized(layout: Layout, form: Form, sizes: Mapping[str, int]) -> Layout:
    """A layout with other sizes for the names of a form."""
    dims = tuple(_resized(at, dim, form, sizes) for at, dim in enumerate(layout.dims))
    return Layout(layout.mesh, dims, layout.dtype, layout.reduction, layout.partial)


def _resized(at: int, dim: Dim, form: Form, sizes: Mapping[str, int]) -> Dim:
    if at in form.fixed:
        return dim
    digits: list[Digit] = []
    low = 1
    for radix, axis in reversed(dim.digits):
        names = [name for (d, place), name in form.names.items() if d == at and low <= place < low * radix]
        size = radix
        for name in names if axis is None else ():
            size = size // form.sizes[name] * sizes[name]
        digits.insert(0, Digit(size, axis))
        low *= radix
    return Dim(tuple(digits), math.prod(d.radix for d in digits))
