"""The layouts that are read off a traced move, for programs generated from two layouts."""

from itertools import product
from math import prod

import pytest

import reshard as rs
from reshard.doctor.dataflow.flow import Numbering
from reshard.doctor.dataflow.trace import Tracer
from reshard.doctor.infer_layouts import infer_layouts, infer_pick
from reshard.geometry.refine import prime_digits, refine
from reshard.types.meaning import meaning
from tests.doctor.fragments import FORTH, GATHER, OFFSET, RESHARD, ZERO, Analysis, text
from tests.doctor.tracing import everywhere

SHAPES = {(2, 3): (12, 30), (2, 4): (16, 24), (3, 3): (18, 27)}
"""For each size of a mesh, a shape of which both dims can be split along both axes, with two elements left."""


def inferred(program, name="r", mesh=None, dtype="f32"):
    """The layouts of a value of the program, back to the parameters, None if there are none."""
    analysis = Analysis(program)
    tracer = Tracer(analysis.maps, Numbering(analysis.flow), frozenset())
    move = infer_layouts(tracer, analysis.flow.origin(analysis.value(name)), mesh, dtype)
    return None if move is None else (move.source, move.target)


def inferred_text(*args, **options):
    pair = inferred(*args, **options)
    return None if pair is None else tuple(map(str, pair))


def placements():
    """The axes that split each of two dims, in every order."""
    for axes in [(), ("x",), ("y",), ("x", "y"), ("y", "x")]:
        for first in range(len(axes) + 1):
            yield axes[:first], axes[first:]


def layout(placement, mesh, shape):
    sizes = dict(mesh.axes)
    tile = [size // prod(sizes[axis] for axis in axes) for axes, size in zip(placement, shape, strict=True)]
    dims = ("".join(f"{{{axis}}}" for axis in axes) + str(n) for axes, n in zip(placement, tile, strict=True))
    return rs.Layout.parse(f"f32[{', '.join(dims)}]", mesh)


def gather_and_slice(source, target, mesh, shape):
    """A program that gathers both dims of the source whole, and slices both dims of the target."""
    dims, lines, name = list(layout(source, mesh, shape).tile_shape), ["%id = u32[] partition-id()"], "p"
    parameter = f"%p = f32[{dims[0]},{dims[1]}]{{1,0}} parameter(0)"
    axes = "mesh['x'={},'y'={}]".format(*dict(mesh.axes).values())
    for dim in (dim for dim in range(2) if source[dim]):
        dims[dim] = shape[dim]
        groups = f"{axes} {{{','.join(map(repr, source[dim]))}}}"
        gather = f"all-gather(%{name}), replica_groups={groups}, dimensions={{{dim}}}"
        name = f"g{dim}"
        lines.append(f"%{name} = f32[{dims[0]},{dims[1]}]{{1,0}} {gather}")
    result = layout(target, mesh, shape)
    for dim in range(2):
        starts = ", ".join(str(meaning(result, device)[dim][0]) for device in range(mesh.size))
        lines += [
            f"%t{dim} = s32[{mesh.size}]{{0}} constant({{{starts}}})",
            f"%s{dim} = s32[1]{{0}} dynamic-slice(%t{dim}, %id), dynamic_slice_sizes={{1}}",
            f"%o{dim} = s32[] reshape(%s{dim})",
        ]
    a, b = result.tile_shape
    lines.append(f"ROOT %r = f32[{a},{b}]{{1,0}} dynamic-slice(%{name}, %o0, %o1), dynamic_slice_sizes={{{a},{b}}}")
    body = "\n".join(f"  {line}" for line in [parameter, *lines])
    return f"HloModule m, num_partitions={mesh.size}\n\nENTRY %main {{\n{body}\n}}\n"


def moving(source, target, mesh, shape):
    """The layouts without the axes that hold the same digit before and after: along those, nothing moves."""
    sizes = dict(mesh.axes)
    source, target, shape = list(source), list(target), list(shape)
    for dim, axis in product(range(2), "xy"):
        strides = [prod(sizes[a] for a in side[dim][: side[dim].index(axis)]) if axis in side[dim] else None
                   for side in (source, target)]  # fmt: skip
        if None not in strides and strides[0] == strides[1]:
            shape[dim] //= sizes[axis]
            for side in (source, target):
                side[dim] = tuple(a for a in side[dim] if a != axis)
    return tuple(layout(side, mesh, shape) for side in (source, target))


def digits(source, target):
    """The digits of a pair of layouts: radix, and the strides of their holders before and after."""
    return sorted((digit.radix, digit.src or 0, digit.dst or 0) for digit in prime_digits(refine(source, target)))


@pytest.mark.fast(1)
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def test_every_pair_of_layouts(sizes):
    """Gathers and slices between all placements of two axes; some pairs have no common digits."""
    mesh, shape = rs.Mesh(dict(zip("xy", sizes, strict=True))), SHAPES[sizes]
    unrelated = 0
    for source, target in product(placements(), placements()):
        got = inferred(gather_and_slice(source, target, mesh, shape), mesh=mesh)
        if refine(layout(source, mesh, shape), layout(target, mesh, shape)) is None:
            assert got is None, (source, target)
            unrelated += 1
        else:
            assert digits(*got) == digits(*moving(source, target, mesh, shape)), (source, target)
            assert [side.tile_bytes for side in got] == [layout(s, mesh, shape).tile_bytes for s in (source, target)]
    assert bool(unrelated) == (sizes == (2, 3))


def test_on_the_users_mesh_or_on_one_of_its_own():
    lines = text(*RESHARD)
    assert inferred_text(lines, "d") == ("f32[{d0}2, 8]", "f32[8, {d0}2]")
    assert inferred_text(lines, "d", mesh=rs.Mesh(a=4)) == FORTH
    assert inferred_text(lines, "d", mesh=rs.Mesh(a=2, b=2)) == ("f32[{a}{b}2, 8]", "f32[8, {a}{b}2]")
    assert inferred_text(lines, "d", mesh=rs.Mesh(a=8)) == ("f32[{d0}2, 8]", "f32[8, {d0}2]")  # it has other devices


def permute(pairs):
    return text(f"ROOT %r = f32[2,8]{{1,0}} collective-permute(%p), source_target_pairs={{{pairs}}}")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (permute("{0,0},{1,2},{2,1},{3,3}"), ("f32[{d0}, {d1}, 2, 8]", "f32[{d1}, {d0}, 2, 8]")),
        (permute("{0,0},{1,1},{2,2},{3,3}"), ("f32[2, 8]", "f32[2, 8]")),
        (permute("{0,1},{1,2},{2,3},{3,0}"), None),  # a ring
        (permute("{0,0},{1,1}"), None),  # padding on two devices
        (permute("{0,0},{0,1},{2,2},{2,3}"), None),  # not a permutation
        (text("ROOT %r = f32[8,2]{1,0} transpose(%p), dimensions={1,0}"), ("f32[8, 2]", "f32[8, 2]")),
        (text("ROOT %r = f32[2,8]{1,0} reverse(%p), dimensions={1}"), None),
        (text("ROOT %r = f32[4,8]{1,0} concatenate(%p, %p), dimensions={0}"), None),
        (text("%z = f32[] constant(0)", "ROOT %r = f32[2,9]{1,0} pad(%p, %z), padding=0_0x0_1"), None),
        (text("ROOT %r = f32[2,0]{1,0} slice(%p), slice={[0:2], [0:0]}"), None),
    ],
    ids=[
        "two axes swapped", "every device keeps its own", "ring", "some devices", "copies", "transpose", "reverse",
        "elements twice", "padding", "no elements",
    ],
)  # fmt: skip
def test_moves_that_are_between_layouts_and_others(program, expected):
    assert inferred_text(program) == expected


def test_rows_are_not_joined_with_columns():
    """Each of two devices keeps one row of its copy: the digit of the rows has no neighbour in its dim."""
    offset = ["%id = u32[] partition-id()", "%zero = u32[] constant(0)"]
    row = "ROOT %r = f32[1,8]{1,0} dynamic-slice(%p, %id, %zero), dynamic_slice_sizes={1,8}"
    assert inferred_text(text(*offset, row, devices=2)) == ("f32[2, 8]", "f32[{d0}, 8]")


def test_the_worked_example():
    """The table of the module's docstring: what each digit of the result adds to the source's device and place."""
    analysis = Analysis(text(*RESHARD))
    points = everywhere(4, (8, 2))
    origins = Tracer(analysis.maps, Numbering(analysis.flow), frozenset())(analysis.value("d"), points)
    device, (row, column) = points.device, points.indices
    assert (origins.device == row // 2).all()
    assert (origins.place == 2 * device + 8 * (row % 2) + column).all()


def picked(*lines, name="e"):
    """The part of a tile that a value is, back to the parameters, and the layouts of its move."""
    analysis = Analysis(text(*OFFSET, ZERO, GATHER, *lines))
    tracer = Tracer(analysis.maps, Numbering(analysis.flow), frozenset())
    inferred_pick = infer_pick(tracer, analysis.flow.origin(analysis.value(name)), "f32")
    return None if inferred_pick is None else (*inferred_pick[3:], *map(str, inferred_pick[:2]))


def test_the_part_that_all_devices_use_of_one():
    line = "ROOT %e = f32[2,3]{1,0} slice(%g), slice={[4:6], [5:8]}"
    assert picked(line) == (((2, 8), (3, 1)), 5, (2,), "f32[{d0}, 2, 3]", "f32[4, 2, 3]")


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %e = f32[2,3]{1,0} slice(%g), slice={[5:7], [5:8]}",
        "ROOT %e = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}",
        "ROOT %e = f32[1,4]{1,0} slice(%g), slice={[0:1], [0:8:2]}",
        "ROOT %e = f32[1,8]{1,0} slice(%p), slice={[0:1], [0:8]}",
    ],
    ids=["of two devices", "other parts", "strided", "its own"],
)
def test_what_is_not_a_part_of_one_device(line):
    assert picked(line) is None
