"""From the text of a call to layouts and a plan."""

from __future__ import annotations

import re
from typing import NamedTuple

from reshard.cli.arguments import Options
from reshard.errors import ReshardError
from reshard.synth import plan
from reshard.types import Layout, Mesh
from reshard.types.notation.detect import read
from reshard.types.plan import Plan
from reshard.types.units import parse_bytes, parse_shape

_OURS = re.compile(r"\s*[A-Za-z_]\w*\s*\[")  # Only our own notation says the shape and the dtype.
_GIVE = re.compile(r"; (?:give|pass) (the mesh|shape and dtype|shape|dtype)(?: that has them)?$")
_OPTIONS = {"mesh": "--mesh x=4,y=2", "shape": "--shape 16,16", "dtype": "--dtype f32"}


def one_layout(options: Options) -> Layout:
    """The layout of a call that is about one."""
    mesh = None if options.mesh is None else Mesh.parse(options.mesh)
    return _read(options.layout, mesh, _shape(options), options.dtype)


def two_layouts(options: Options) -> tuple[Layout, Layout]:
    """Source and target; what one of them says (shape, dtype, mesh) serves for the other."""
    mesh = None if options.mesh is None else Mesh.parse(options.mesh)
    target_mesh = mesh if options.target_mesh is None else Mesh.parse(options.target_mesh)
    shape, dtype = _shape(options), options.dtype
    if _OURS.match(options.source):
        source = _read(options.source, mesh, shape, dtype)
        return source, _second(options.target, target_mesh, source, shape, dtype)
    if _OURS.match(options.target):
        target = _read(options.target, target_mesh, shape, dtype)
        return _second(options.source, mesh, target, shape, dtype), target
    return _neither_ours(options, mesh, target_mesh, shape)


class Request(NamedTuple):
    """What a call asks for. The plan may spell the same two layouts on another mesh."""

    source: Layout
    target: Layout
    plan: Plan


def planned(options: Options) -> Request:
    """The layouts of a call, and the plan between them."""
    source, target = two_layouts(options)
    budget = None if options.budget is None else parse_bytes(options.budget)
    return Request(source, target, plan(source, target, budget, options.network, options.donate))


def _second(text: str, mesh: Mesh | None, first: Layout, shape: tuple[int, ...] | None, dtype: str | None) -> Layout:
    """The other layout. One in our notation keeps its own shape, so that `plan` can say what differs."""
    if _OURS.match(text):
        return _read(text, mesh, shape, dtype)
    return _borrowing(text, mesh, first, first.shape, first.dtype)


def _neither_ours(
    options: Options, mesh: Mesh | None, target_mesh: Mesh | None, shape: tuple[int, ...] | None
) -> tuple[Layout, Layout]:
    """Two shardings without shape; one that brings its own mesh lends it to one that has none."""
    dtype = options.dtype
    try:
        source = _read(options.source, mesh, shape, dtype)
    except ReshardError as error:
        if mesh is not None:
            raise
        # It may lack only a mesh, and the target may bring one.
        try:
            target = _read(options.target, target_mesh, shape, dtype)
        except ReshardError:
            raise error from None
        return _read(options.source, target.mesh, shape, dtype), target
    target = _borrowing(options.target, target_mesh, source, shape, dtype)
    if mesh is None and source.mesh.size == 1 < target.mesh.size:
        return _borrowing(options.source, None, target, shape, dtype), target
    return source, target


def _borrowing(
    text: str, mesh: Mesh | None, lender: Layout, shape: tuple[int, ...] | None, dtype: str | None
) -> Layout:
    """A layout on its own mesh if it brings one, else on the lender's."""
    if mesh is not None:
        return _read(text, mesh, shape, dtype)
    try:
        found = _read(text, None, shape, dtype)
    except ReshardError:
        return _read(text, lender.mesh, shape, dtype)
    if found.mesh.size == 1 < lender.mesh.size:  # `{replicated}` does not say over how many devices.
        return _read(text, lender.mesh, shape, dtype)
    return found


def _read(text: str, mesh: Mesh | None, shape: tuple[int, ...] | None, dtype: str | None) -> Layout:
    """Reads a layout; what is missing is named as the options that give it."""
    try:
        return read(text, mesh, shape, dtype)
    except ReshardError as error:
        missing = _GIVE.search(str(error))
        if missing is None:
            raise
        options = " ".join(option for word, option in _OPTIONS.items() if word in missing[1])
        raise type(error)(f"{error}: {options}") from None


def _shape(options: Options) -> tuple[int, ...] | None:
    return None if options.shape is None else parse_shape(options.shape)
