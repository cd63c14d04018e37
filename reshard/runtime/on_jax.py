"""Plans on global JAX arrays: the lowered program inside `jax.shard_map`.

Layouts are by position: device d of a plan is the d-th device of the jax mesh, over those axes that are not manual
already. Uneven dims are padded to whole pieces before the move and trimmed after it; XLA stores shards padded anyway,
so neither moves data.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache, partial
from itertools import pairwise
from types import MappingProxyType

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from reshard.errors import MeshError
from reshard.lower import lower_plan
from reshard.lower.program import Program, lower_batch, lower_steps
from reshard.lower.to_shard_map import Beside, batch_function, make_unfilled, shares_lie_in_order, spread_scale
from reshard.plans.plan import Batch, Plan, Step
from reshard.runtime.xla import LEAST as LEAST
from reshard.runtime.xla import PARTS as PARTS
from reshard.runtime.xla import in_parts as in_parts
from reshard.runtime.xla import in_parts_on_gpu as in_parts_on_gpu
from reshard.runtime.xla import in_parts_on_tpu as in_parts_on_tpu
from reshard.runtime.xla import in_rounds as in_rounds
from reshard.runtime.xla import peak_bytes as peak_bytes
from reshard.runtime.xla import slice_exchanges
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.notation import jax_sharding

AnyMesh = JaxMesh | AbstractMesh


def apply_plan(
    plan: Plan,
    mesh: AnyMesh,
    array: jax.Array,
    into: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    sliced: bool = False,
) -> jax.Array:
    """Moves an array by a plan; may be traced inside `jax.jit`. `into` is a target of which the plan fills a part, and
    `scale` what its cast divides or multiplies by. What is in pieces of any size comes and goes as its tiles, one after
    another along each dim; `sliced`, in one collective where that is faster, which needs more memory.

    The axes of `mesh` that are not manual have the plan's devices by position; they are cut where the layouts use
    parts of them. Layouts are contiguous, as those of a `NamedSharding` are. Raises `LayoutError` for a reduction
    that JAX cannot express.

    >>> import jax.numpy as jnp, reshard as rs
    >>> rows = rs.Layout.parse("f32[{x}4, 4]", rs.Mesh(x=1))
    >>> apply_plan(rs.plan(rows, rows), jax.make_mesh((1,), ("x",)), jnp.ones((4, 4))).shape
    (4, 4)
    """
    if not plan.steps:
        return array
    program = lower_plan(plan)
    return _move_arrays([plan], [slice_exchanges(plan, program) if sliced else program], mesh, [array], into, scale)[0]


def make_unfilled_array(layout: Layout, mesh: AnyMesh) -> jax.Array:
    """An array of this layout, traced, of which plans fill every part: its memory is not written before where XLA can
    leave it so.

    >>> import reshard as rs
    >>> rows = rs.Layout.parse("f32[{x}4, 4]", rs.Mesh(x=1))
    >>> make_unfilled_array(rows, jax.make_mesh((1,), ("x",))).shape
    (4, 4)
    """
    mesh = cut_mesh(mesh, [layout])
    axes = list_free_axes(mesh)
    held = spell_spec(layout, axes)
    make = partial(make_unfilled, layout.tile_shape, layout.dtype)
    whole = jax.shard_map(
        make, mesh=mesh, in_specs=(), out_specs=held, axis_names=frozenset(axes.axes), check_vma=False
    )()
    return _trim_array(whole, layout, NamedSharding(mesh, held))


def apply_batch(batch: Batch, mesh: AnyMesh, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Moves the arrays of a batch, all on this mesh, in one launch a step; may be traced, as `apply_plan`.

    >>> import jax.numpy as jnp, reshard as rs
    >>> rows = rs.Layout.parse("f32[{x}4, 4]", rs.Mesh(x=1))
    >>> batch = rs.plan_tree({"a": (rows, rows)}).batches[0]
    >>> [x.shape for x in apply_batch(batch, jax.make_mesh((1,), ("x",)), [jnp.ones((4, 4))])]
    [(4, 4)]
    """
    if not batch.steps:
        return list(arrays)
    return _move_arrays(batch.plans, lower_batch(batch), mesh, arrays)


def _move_arrays(
    plans: Sequence[Plan],
    programs: Sequence[Program],
    mesh: AnyMesh,
    arrays: Sequence[jax.Array],
    into: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> list[jax.Array]:
    """Moves arrays by the programs of their plans, in one `shard_map`; uneven ones are padded before and cut after."""
    mesh = cut_mesh(mesh, [end for plan in dict.fromkeys(plans) for end in (plan.source, plan.target)])
    axes = list_free_axes(mesh)
    before, after = [spell_spec(plan.source, axes) for plan in plans], [spell_spec(plan.target, axes) for plan in plans]
    given: list[jax.Array] = []
    for plan, array, held in zip(plans, arrays, before, strict=True):
        typed = jax.typeof(array).sharding
        # `shard_map` compares a type with the layout. "Reduced" axes only say that cotangents are unreduced, and those
        # of size 1 are in no layout.
        wide = {name for name, size in typed.mesh.shape.items() if size > 1}
        bare = keep_axes(typed.spec, wide).update(reduced=frozenset())
        if bare != typed.spec:
            array = jax.sharding.reshard(array, NamedSharding(typed.mesh, bare))
        given.append(_pad_array(array, plan.source, NamedSharding(mesh, held)))
    more: dict[str, jax.Array] = {}
    specs = list(before)
    if into is not None:
        more["into"] = _pad_array(into, plans[0].target, NamedSharding(mesh, after[0]))
        specs.append(after[0])
    if scale is not None:
        first = narrows_first(plans[0].steps)
        wide, held = (plans[0].source, before[0]) if first else (plans[0].target, after[0])
        more["scale"], spelled = spread_scale(scale, wide, held)
        specs.append(spelled)
    moved = _map_tiles(programs, mesh, axes, specs, tuple(after), tuple(more))(*given, *more.values())
    results: list[jax.Array] = []
    for plan, array, held in zip(plans, moved, after, strict=True):
        results.append(_trim_array(array, plan.target, NamedSharding(mesh, held)))
    return results


@lru_cache(maxsize=1024)
def compile_to_stack(
    source: Layout, steps: tuple[Step, ...], mesh: AnyMesh, overwrites: bool = False
) -> Callable[..., jax.Array]:
    """The compiled move to a stack: the tiles after some steps, padding included, along dim 0 in the order of devices.

    If the first step casts, a scale may be given beside the array. `tiles` are stacks of what else the steps read by
    the tiles of the result: `into`, of which they fill a part and which they may overwrite, and `scale`, if a later
    step casts.
    """
    mesh = cut_mesh(mesh, (source,))  # An array with explicit axes keeps their names: only the source is spelled.
    axes = list_free_axes(mesh)
    before, result = spell_spec(source, axes), steps[-1].result if steps else source
    stack = spell_stack_spec(mesh, result)
    programs = [lower_steps(source, steps)]

    def moved(
        array: jax.Array, scale: jax.Array | None = None, tiles: Mapping[str, jax.Array] = MappingProxyType({})
    ) -> jax.Array:
        more, specs = dict(tiles), [before, *[stack] * len(tiles)]
        if scale is not None:
            more["scale"], held = spread_scale(scale, source, before)
            specs.append(held)
        return _map_tiles(programs, mesh, axes, specs, (stack,), tuple(more))(array, *more.values())[0]

    return jax.jit(moved, donate_argnums=(2,) if overwrites else ())


@lru_cache(maxsize=1024)
def compile_from_stack(
    source: Layout, steps: tuple[Step, ...], mesh: AnyMesh, target: NamedSharding
) -> tuple[Callable[..., jax.Array], NamedSharding]:
    """The compiled move from a stack of the source's tiles, which it may overwrite, and the stack's sharding.

    Beside the stack it takes the array of which a step fills a part, and the scale of a cast. The target must be even.
    """
    result = steps[-1].result
    mesh = cut_mesh(mesh, (source, result))
    axes = list_free_axes(mesh)
    stack = NamedSharding(mesh, spell_stack_spec(mesh, source))
    after = spell_spec(result, axes)
    programs = [lower_steps(source, steps, donate=True)]

    def moved(tiles: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        more = {} if into is None else {"into": into}
        specs = [stack.spec, after] if more else [stack.spec]
        if scale is not None:
            more["scale"], held = spread_scale(scale, result, after)
            specs.append(held)
        return _map_tiles(programs, mesh, axes, specs, (after,), tuple(more))(tiles, *more.values())[0]

    donated = (0,) if source.tile_bytes == result.tile_bytes and source.dtype == result.dtype else ()
    return jax.jit(moved, out_shardings=target, donate_argnums=donated), stack


def spell_stack_spec(mesh: AnyMesh, layout: Layout) -> PartitionSpec:
    """The spec of an array of which each device's shard is a tile of the layout; a scalar's tiles are not stacked."""
    return PartitionSpec(tuple(mesh.axis_names)) if layout.shape else PartitionSpec()


def _map_tiles(
    programs: Sequence[Program],
    mesh: AnyMesh,
    axes: Mesh,
    before: Sequence[PartitionSpec],
    after: tuple[PartitionSpec, ...],
    more: tuple[str, ...] = (),
) -> Callable[..., tuple[jax.Array, ...]]:
    """The programs on global arrays: those of the sources, then `more` by name."""
    platform = str(mesh.devices.flat[0].platform) if isinstance(mesh, JaxMesh) else None
    run, count = batch_function(programs, axes.axes, platform), len(after)

    def run_on_tiles(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        return run(*tiles[:count], beside=Beside(**dict(zip(more, tiles[count:], strict=True))))

    return jax.shard_map(
        run_on_tiles,
        mesh=mesh,
        in_specs=tuple(before),
        out_specs=after,
        axis_names=frozenset(axes.axes),
        check_vma=False,  # Its rules cannot see that gathers and permutes give replicated results.
    )


def list_free_axes(mesh: AnyMesh) -> Mesh:
    """The axes of a jax mesh that are not manual, with its devices by position."""
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return Mesh({str(name): size for (name, size), kind in kinds if kind != AxisType.Manual})


def spell_spec(layout: Layout, axes: Mesh) -> PartitionSpec:
    """The layout's `PartitionSpec` on axes with the same devices by position."""
    held = [[d.axis for d in dim.digits if d.axis is not None] for dim in layout.dims]
    return jax_sharding.partition_spec(layout.mesh, held, layout.partial, layout.reduction, axes)


def narrows_first(steps: Sequence[Step]) -> bool:
    """Whether the first step casts to a narrower dtype: its scale is on the indices of the source, else the target's.

    >>> layouts = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}4]", "bf16[{x}4]")]
    >>> narrows_first([Step("cast", *layouts)]), narrows_first([Step("cast", *reversed(layouts))])
    (True, False)
    """
    return dtypes.bits(steps[0].result.dtype) < dtypes.bits(steps[0].operand.dtype)


def overwrites_source(plan: Plan) -> bool:
    """Whether XLA can run the plan's exchanges in place; it would copy a tile whose shares must be rearranged first."""
    return not any(step.mode.in_place for step in plan.steps) or shares_lie_in_order(lower_plan(plan))


def keep_axes(spec: PartitionSpec, axes: Set[object]) -> PartitionSpec:
    """The spec over these axes alone.

    >>> keep_axes(PartitionSpec(("x", "y"), "z", unreduced={"w"}), {"x"})
    P('x', None)
    """
    named = (entry if isinstance(entry, tuple) else (entry,) for entry in spec.partitions)
    unreduced = spec.unreduced & axes
    return PartitionSpec(
        *(tuple(name for name in names if name in axes) or None for names in named),
        unreduced=unreduced,
        reduced=spec.reduced & axes,
        unreduced_kind=spec.unreduced_kind if unreduced else None,
    )


def _pad_array(array: jax.Array, layout: Layout, sharding: NamedSharding) -> jax.Array:
    if layout.even or layout.ragged:
        return array
    room = [(0, to - now, 0) for now, to in zip(layout.shape, layout.padded_shape, strict=True)]
    array = lax.with_sharding_constraint(array, sharding)
    return lax.with_sharding_constraint(lax.pad(array, np.zeros((), array.dtype), room), sharding)


def _trim_array(array: jax.Array, layout: Layout, sharding: NamedSharding) -> jax.Array:
    if layout.even or layout.ragged:
        return array
    return lax.with_sharding_constraint(lax.slice(array, [0] * array.ndim, layout.shape), sharding)


def cut_mesh(mesh: AnyMesh, layouts: Sequence[Layout]) -> AnyMesh:
    """The mesh itself if the layouts use whole axes of it, else one whose axes are cut where the layouts cut them.

    Raises `MeshError` if axes must be cut but one is manual, or if the cuts do not divide each other.

    >>> halves = Layout.parse("f32[{x:(1)2}8]", Mesh(x=4, y=2))
    >>> dict(cut_mesh(AbstractMesh((4, 2), ("x", "y")), [halves]).shape)
    {'axis0': 2, 'axis1': 2, 'axis2': 2}
    """
    own = list_free_axes(mesh)
    spans = [_find_axis_strides(own, axis) for axis in map(own.sub_axis, own.axes)]
    used = [(layout.mesh, axis) for layout in layouts for axis in (*layout.held, *layout.partial)]
    ends = sorted({1, own.size}.union(*spans, *(_find_axis_strides(*each) for each in used)))
    if not any(low < end < high for low, high in spans for end in ends):
        return mesh
    refusal = f"mesh {own} cannot be cut for {', '.join(map(str, layouts))}"
    if any(high % low for low, high in pairwise(ends)):
        raise MeshError(f"{refusal}: its axes would have to be cut at {ends}, which do not divide each other")
    if any(kind == AxisType.Manual for kind in mesh.axis_types):
        raise MeshError(f"{refusal} inside a shard_map that is manual over other axes; use layouts of whole axes there")
    sizes = tuple(high // low for low, high in pairwise(ends))[::-1]
    names = tuple(f"axis{at}" for at in range(len(sizes)))
    if isinstance(mesh, JaxMesh):
        return JaxMesh(mesh.devices.reshape(sizes), names)
    return AbstractMesh(sizes, names)


def _find_axis_strides(mesh: Mesh, axis: SubAxis) -> tuple[int, int]:
    """The strides at which an axis begins and ends."""
    return mesh.stride(axis), mesh.stride(axis) * axis.size
