"""The peer planner: OpenXLA Shardy's `sdy-reshard-to-collectives`, run in this process by jaxlib.

`shardy_steps` asks it for one pair of layouts and reads its collectives back as our step names and
layouts; `shardy_many` does so for many pairs in few modules. What Shardy refuses is None, so that
a comparison can count it instead of losing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.interpreters.mlir import make_ir_context

from reshard.errors import LayoutError
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis

Pair = tuple[Layout, Layout]
Steps = list[tuple[str, Layout]]

KINDS = {
    "sdy.all_gather": "all_gather",
    "sdy.all_slice": "slice",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "permute",
    "sdy.reduce_scatter": "reduce_scatter",
    "sdy.all_reduce": "all_reduce",
}
# As in Shardy's own export pipeline, canonicalization follows: it fuses all_reduce + all_slice into
# reduce_scatter, and drops the permutes to where the array already is.
_PIPELINE = "builtin.module(func.func(sdy-reshard-to-collectives),canonicalize)"
_CHUNK = 256


def shardy_steps(source: Layout, target: Layout) -> Steps | None:
    """Shardy's plan from source to target: each step's kind and the layout after it.

    None when Shardy has no plan: its pass or its verifier fails, its steps end in another layout or
    overlap in sub-axes, or it cannot say the layouts (different meshes; local digits before held
    ones; a reduction other than sum; a target partial over sub-axes that are not just so partial in
    the source). Of uneven arrays it plans shardings, not tiles: pieces of 3 out of pieces of 5 count
    as a slice, so its steps there need not be collectives on tiles.

    Raises `LayoutError` if the layouts are not of one array.
    """
    return shardy_many([(source, target)])[0]


def shardy_many(pairs: Iterable[Pair]) -> list[Steps | None]:
    """`shardy_steps` of each pair, in order; a pair that fails does not affect the others."""
    moves = list(pairs)
    plans: list[Steps | None] = [None] * len(moves)
    groups: dict[Mesh, list[int]] = {}
    for at, (source, target) in enumerate(moves):
        _check_pair(source, target)
        if _expressible(source, target):
            groups.setdefault(source.mesh, []).append(at)
    for group in groups.values():
        for start in range(0, len(group), _CHUNK):
            chunk = group[start : start + _CHUNK]
            for at, plan in zip(chunk, _run([moves[i] for i in chunk]), strict=True):
                plans[at] = plan
    return plans


def _check_pair(source: Layout, target: Layout) -> None:
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise LayoutError(
            f"source {source} has global shape {source.shape} and dtype {source.dtype}, target {target} has "
            f"{target.shape} and {target.dtype}; give two layouts of the same array"
        )


def _expressible(source: Layout, target: Layout) -> bool:
    """Whether Shardy's shardings can say both layouts, and that the move is a reduction if it is one."""
    return (
        source.mesh == target.mesh
        and _contiguous(source)
        and _contiguous(target)
        and source.reduction in (None, "sum")
        # The pass takes a newly partial target at its word and adds no step that would make it so.
        and set(target.partial) <= set(source.partial)
    )


def _contiguous(layout: Layout) -> bool:
    """Whether every dim is held digits, then local ones: the only tiles that Shardy has."""
    tiled = Layout.tiled(layout.mesh, layout.shape, layout.dtype, _held(layout), layout.partial, layout.reduction)
    return tiled == layout


def _held(layout: Layout) -> list[list[SubAxis]]:
    return [[d.axis for d in dim.digits if d.axis is not None] for dim in layout.dims]


def _run(pairs: Sequence[Pair]) -> list[Steps | None]:
    """The plans of pairs of one mesh. A module fails as a whole, so halving finds the pairs to blame."""
    plans = _run_module(pairs)
    if plans is not None:
        return plans
    half = len(pairs) // 2
    return [*_run(pairs[:half]), *_run(pairs[half:])] if half else [None]


def _run_module(pairs: Sequence[Pair]) -> list[Steps | None] | None:
    """The plans of pairs from one module, or None if Shardy's passes fail on any of them."""
    with make_ir_context(), ir.Location.unknown():
        # Outside the try: text that does not parse is our mistake, not Shardy's refusal.
        module = ir.Module.parse(_module_text(pairs))
        manager = passmanager.PassManager.parse(_PIPELINE)
        try:
            # The run ends in the verification of the whole module, which alone compares tile sizes: a
            # function's own does not, for they need the mesh, a symbol outside of it.
            manager.run(module.operation)
        except ir.MLIRError:
            return None
        functions = [op for op in module.body.operations if op.operation.name == "func.func"]
        return [_read(function, *pair) for function, pair in zip(functions, pairs, strict=True)]


def _read(function: ir.OpView, source: Layout, target: Layout) -> Steps | None:
    """The steps that one function's operations make; None if they do not make the move.

    The verifier compares neighbouring operations, not the last one with the target: some releases
    end elsewhere (jax 0.10.2 on <x=2, y=3, z=5, w=7>), which is no plan.
    """
    *body, _ = function.regions[0].blocks[0].operations
    if any(op.operation.name == "sdy.reshard" for op in body):
        return None
    try:
        steps = [_step(op.operation, source) for op in body]
    except LayoutError:  # Sub-axes that overlap, as x:(1)2 and x:(3)2 of x=6: the verifier passes some.
        return None
    last = steps[-1][1] if steps else source
    return steps if last == target else None


def _step(op: ir.Operation, like: Layout) -> tuple[str, Layout]:
    """One collective's kind and the layout after it."""
    if op.name not in KINDS:
        raise RuntimeError(f"operation {op.name} has no step kind; add it to KINDS:\n{op}")
    sharding = sdy.TensorShardingAttr(op.attributes["out_sharding"])
    mesh = like.mesh
    axes = [_sub_axes(mesh, sdy.DimensionShardingAttr(dim).axes) for dim in sharding.dimension_shardings]
    partial = _sub_axes(mesh, sharding.unreduced_axes)
    return KINDS[op.name], Layout.tiled(mesh, like.shape, like.dtype, axes, partial, like.reduction)


def _sub_axes(mesh: Mesh, axes: Iterable[ir.Attribute]) -> list[SubAxis]:
    return [_sub_axis(mesh, sdy.AxisRefAttr(axis)) for axis in axes]


def _sub_axis(mesh: Mesh, axis: sdy.AxisRefAttr) -> SubAxis:
    if axis.sub_axis_info is None:
        return mesh.sub_axis(axis.name)
    info = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return mesh.sub_axis(f"{axis.name}:({info.pre_size}){info.size}")


def _module_text(pairs: Sequence[Pair]) -> str:
    """One function per pair. Device ids are left out: along its axes every mesh is the same."""
    mesh = pairs[0][0].mesh
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.axes.items())
    functions = "".join(_function_text(f"f{at}", *pair) for at, pair in enumerate(pairs))
    return f"sdy.mesh @mesh = <[{axes}]>\n{functions}"


def _function_text(name: str, source: Layout, target: Layout) -> str:
    """The reshard; before it, as Shardy's own insertion pass puts it, the sum over partial axes."""
    tensor = _type_text(source)
    reduced = [axis for axis in source.partial if axis not in target.partial]
    held = _held(source)
    value, reduction = "%a", ""
    if reduced:
        value = "%b"
        out = _sharding_text(source.mesh, held, target.partial)
        reduction = f" %b = sdy.all_reduce {{{_axes_text(source.mesh, reduced)}}} %a out_sharding={out} : {tensor}\n"
    given = _sharding_text(source.mesh, held, source.partial)
    wanted = _sharding_text(source.mesh, _held(target), target.partial)
    return (
        f"func.func @{name}(%a: {tensor} {{sdy.sharding = #sdy.sharding{given}}}) -> {tensor} {{\n{reduction}"
        f" %r = sdy.reshard {value} {wanted} : {tensor}\n return %r : {tensor}\n}}\n"
    )


def _sharding_text(mesh: Mesh, dims: Sequence[Sequence[SubAxis]], partial: Sequence[SubAxis]) -> str:
    axes = ", ".join(f"{{{_axes_text(mesh, dim)}}}" for dim in dims)
    unreduced = f", unreduced={{{_axes_text(mesh, partial)}}}" if partial else ""
    return f"<@mesh, [{axes}]{unreduced}>"


def _axes_text(mesh: Mesh, axes: Sequence[SubAxis]) -> str:
    return ", ".join(_axis_text(mesh, axis) for axis in axes)


def _axis_text(mesh: Mesh, axis: SubAxis) -> str:
    name = f'"{axis.axis}"'
    return name if axis.size == mesh.axes[axis.axis] else f"{name}:({axis.pre}){axis.size}"


def _type_text(layout: Layout) -> str:
    return f"tensor<{''.join(f'{size}x' for size in layout.shape)}{_element_text(layout.dtype)}>"


def _element_text(dtype: str) -> str:
    """MLIR's name of a dtype: `i1`, `i8`, `ui8`, `f32`, `bf16`, `f8E4M3FN`, `complex<f32>`."""
    short = dtypes.short(dtype)
    if short == "pred":
        return "i1"
    if short == "bf16":
        return short
    kind, rest = short[0], short[1:]
    if kind == "c":
        return f"complex<f{dtypes.bits(dtype) // 2}>"
    return {"s": "i", "u": "ui", "f": "f"}[kind] + rest.upper()
