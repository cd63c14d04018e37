"""What a caller of `autoshard` fixes: paths of arguments and results, and the PartitionSpecs that they keep.

{"params": P("x")}               every array of the argument `params`
{"params/w1": P(None, "y")}      one of them; of several paths that an array lies under, the longest counts
{"params/layers/*/w": P("x")}    a star is any one name, as `print(choice)` has it for the numbers of layers
{"1": P("x")}                    the arrays of the second argument
{"result/0": P()}                the arrays of the first result; "result" is all of what the function returns
{"params/w1": None}              free, though "params" is fixed; P.UNCONSTRAINED as a spec says the same
{"batch": P("x", P.UNCONSTRAINED)}    the first dim is split along x, the second is free
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import LayoutError, about_sharding, did_you_mean, quoted
from reshard.jax.layout_choice.explain import name_pattern
from reshard.jax.layout_choice.trace_step import StepValue, TracedStep
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

_OPEN: Any = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True)
class FixedSpecs:
    """The specs of the arguments and results that the caller fixed, by their numbers."""

    arguments: Mapping[int, PartitionSpec]
    results: Mapping[int, PartitionSpec]


def read_fixed(given: object, step: TracedStep, mesh: Mesh) -> FixedSpecs:
    """The specs that `given` says, a mapping from paths to specs, `NamedSharding`s or None.

    Raises `LayoutError` for a path that names nothing, and for a spec that an array cannot have.
    """
    if given is None:
        return FixedSpecs({}, {})
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"fixed {quoted(given)}: give a dict of paths and specs, {{'params/w1': P('x')}}, or None to fix nothing"
        )
    paths: dict[str, Any] = {str(path).strip("/"): spec for path, spec in given.items()}  # pyright: ignore
    # An argument has a path by its name, and one by its number.
    named = {
        at: [value.name, "/".join([str(value.position), *value.name.split("/")[1:]])]
        for at, value in enumerate(step.arguments)
    }
    returned = {at: [value.name] for at, value in enumerate(step.results)}
    every = {name for names in (*named.values(), *returned.values()) for name in names}
    for path in paths:
        if not any(map(_match_path(path).match, every)):
            parts = [name.split("/") for name in every]
            known = {"/".join(each[: at + 1]) for each in parts for at in range(len(each))}
            taken = ", ".join(dict.fromkeys(name_pattern(each.name) for each in step.arguments))
            returned_names = ", ".join(each.name for each in step.results)
            raise LayoutError(
                f"fixed {quoted(path)} is the path of no argument or result; there are {quoted(taken)} and "
                f"{quoted(returned_names)}{did_you_mean(path, sorted(known))}"
            )
    return FixedSpecs(
        _match_paths(paths, named, step.arguments, mesh), _match_paths(paths, returned, step.results, mesh)
    )


def _match_path(path: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(path).replace(r'\*', '[^/]+')}(/|\Z)")


def _match_paths(
    paths: Mapping[str, Any], names: Mapping[int, list[str]], values: tuple[StepValue, ...], mesh: Mesh
) -> dict[int, PartitionSpec]:
    found: dict[int, PartitionSpec] = {}
    patterns = {path: _match_path(path) for path in paths}
    for number, value in enumerate(values):
        over = [path for path in paths if any(map(patterns[path].match, names[number]))]
        if not over:
            continue
        # An array has two names, so that two paths of one length may both be over it: they say one thing, or the first.
        path = max(over, key=lambda path: (path.count("/"), -path.count("*")))
        spec = paths[path].spec if isinstance(paths[path], NamedSharding) else paths[path]
        if spec is None or spec is _OPEN:
            continue
        if not isinstance(spec, PartitionSpec):
            raise LayoutError(
                f"fixed {quoted(path)}: {quoted(spec)} is a {type(spec).__name__}; give a jax.sharding.PartitionSpec, "
                f"a NamedSharding, or None to leave it free"
            )
        check_spec(spec, value, mesh)
        found[number] = spec
    return found


def check_spec(spec: PartitionSpec, value: StepValue, mesh: Mesh) -> None:
    """Raises `LayoutError` for a spec that an array on this mesh cannot have, or not in tiles of one size."""
    closed = PartitionSpec(*(None if entry is _OPEN else entry for entry in spec.partitions))
    if spec.unreduced or spec.reduced:
        raise LayoutError(
            f"fixed {value.name}: {spec} is of a sum that is not finished; arguments and results are whole"
        )
    with about_sharding(f"{spec} of {value.name}", value.shape):
        if not Layout.from_spec(closed, mesh, value.shape, value.dtype).even:
            raise LayoutError(
                "its dims do not divide by the axes, and programs of tiles need tiles of one size; pad the array, or "
                "leave the dim free"
            )
