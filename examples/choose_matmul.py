"""A matrix product that chooses its grid of devices, 1-D, 2-D or 2.5-D, by what the plans of its three moves cost.

    reshard run -n 4 examples/choose_matmul.py

On a grid of m x n x k every device gets one block of A and of B, and products are added up along k. Before and after,
A, B and C lie spread over all devices. `choose` prices grids by their plans: bytes received, or seconds with
`--network h100`. To see that it misses nothing, all layouts of A, B and C on all meshes of up to three axes are priced
as well. What no algorithm can go below is from Al Daas et al., "Tight memory-independent parallel matrix multiplication
communication lower bounds" (2022). At the end the ranks multiply.
"""

import argparse
import itertools
import math
from functools import cache

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import DistArray
from reshard.runtime import measure

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
parser.add_argument("--network", help="one of reshard's presets")
SHAPES = [(1024, 1024, 1024), (65536, 1024, 1024), (8192, 8192, 512)]
parser.add_argument("--shapes", type=lambda text: tuple(map(int, text.split(","))), nargs="+", default=SHAPES)
OPTIONS, comm = parser.parse_args(), MPI.COMM_WORLD
Axes, Shape = str | tuple[str, ...], tuple[int, int, int]


def place(mesh: rs.Mesh, shape: tuple[int, ...], rows: Axes, columns: Axes, summed: Axes = ()) -> rs.Layout:
    return rs.Layout.from_spec(mesh, shape, "float32", [list(rows), list(columns)], unreduced=list(summed))


@cache
def price(move: tuple[rs.Layout, rs.Layout]) -> float:
    plan = rs.plan(*move, network=OPTIONS.network)
    return plan.seconds if OPTIONS.network else plan.received_bytes


def list_grids(devices: int, ordered: bool = True) -> list[tuple[int, ...]]:
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    grids = (grid for grid in itertools.product(sizes, repeat=3) if ordered or list(grid) == sorted(grid))
    return [grid for grid in grids if math.prod(grid) == devices]


def choose(shape: Shape, devices: int) -> tuple[float, tuple[int, ...], list[tuple[rs.Layout, rs.Layout]]]:
    """The least cost, its grid, and the moves of A, of B and of C's summands."""
    (m, n, k), found = shape, []
    # On a network, neighbours along the last axis are the nearest.
    orders = [*itertools.permutations("mnk")] if OPTIONS.network else ["mnk"]
    for grid, order in itertools.product(list_grids(devices), orders):
        mesh = rs.Mesh({axis: grid["mnk".index(axis)] for axis in order})
        a, b = place(mesh, (m, k), "m", "k"), place(mesh, (k, n), "k", "n")
        c = place(mesh, (m, n), "m", "n", "k")
        moves = [
            min([(place(mesh, (m, k), *end), a) for end in (("mn", "k"), ("m", "kn"))], key=price),
            min([(place(mesh, (k, n), *end), b) for end in (("km", "n"), ("k", "nm"))], key=price),
            min([(c, place(mesh, (m, n), *end)) for end in (("mk", "n"), ("m", "nk"))], key=price),
        ]
        found.append((sum(map(price, moves)), grid, moves))
    return min(found, key=lambda each: each[0])


def price_all(shape: Shape, devices: int) -> tuple[float, int]:
    """The least cost of all layouts of A, B and C, and how many there are but for axes' names; ranks take shares."""
    (m, n, k), found, tried = shape, math.inf, 0
    for grid in list_grids(devices, ordered=bool(OPTIONS.network)):
        mesh = rs.Mesh({axis: size for axis, size in zip("xyz", grid, strict=True) if size > 1})
        orders, cuts = [*itertools.permutations(mesh.axes)], range(len(mesh.axes) + 1)
        ends = [(order[:cut], order[cut:]) for order in orders for cut in cuts]
        unlike = {order if OPTIONS.network else tuple(mesh.axes[axis] for axis in order): order for order in orders}
        ways = [*itertools.product(unlike.values(), itertools.combinations_with_replacement(cuts, 2))]
        for order, (one, two) in ways[comm.rank :: comm.size]:
            rows, columns, summed = order[:one], order[one:two], order[two:]
            a, b = place(mesh, (m, k), rows, summed), place(mesh, (k, n), summed, columns)
            c = place(mesh, (m, n), rows, columns, summed)
            total = sum(min(price((place(mesh, need.shape, *end), need)) for end in ends) for need in (a, b))
            found = min(found, total + min(price((c, place(mesh, c.shape, *end))) for end in ends))
            tried += len(ends) ** 3
    return comm.allreduce(found, MPI.MIN), comm.allreduce(tried)


def bound_bytes(shape: Shape, devices: int) -> float:
    k, n, m = sorted(shape)  # 3-D grids are best, and 2-D and 1-D ones in the two cases below.
    needed = 3 * (m * n * k / devices) ** (2 / 3)
    if devices <= m * n / k**2:
        needed = 2 * math.sqrt(m * n * k * k / devices) + m * n / devices
    if devices <= m / n:
        needed = (m * n + m * k) / devices + n * k
    return 4 * (needed - (m * n + m * k + n * k) / devices)


def multiply(shape: Shape) -> bool:
    """Multiplies on these ranks, on the grid that is chosen; whether product and bytes are right."""
    _, _, (of_a, of_b, of_c) = choose(shape, comm.size)
    a = DistArray.from_function(lambda i, j: (3 * i + 7 * j) % 5 - 2, of_a[0], comm)
    b = DistArray.from_function(lambda i, j: (5 * i + 2 * j) % 7 - 3, of_b[0], comm)
    with measure() as measured:
        product = a.redistribute(of_a[1]).unpadded @ b.redistribute(of_b[1]).unpadded
        c = DistArray(of_c[0], product, comm).redistribute(of_c[1])
    same = np.array_equal(c.to_global(root=None), a.to_global(root=None) @ b.to_global(root=None))
    return same and measured.received_bytes <= sum(rs.plan(*move).received_bytes for move in (of_a, of_b, of_c))


def main() -> bool:
    right = True
    if comm.rank == 0:
        print("m, n, k             devices  grid m x n x k    received B  over bound  best     tried  as numpy")
    for shape, devices in itertools.product(OPTIONS.shapes, OPTIONS.devices):
        (cost, grid, moves), (best, tried) = choose(shape, devices), price_all(shape, devices)
        ran = devices != comm.size or comm.allreduce(multiply(tuple(size // 8 for size in shape)), MPI.LAND)
        right = right and ran and math.isclose(cost, best)
        if comm.rank == 0:
            bound, received = bound_bytes(shape, devices), sum(rs.plan(*move).received_bytes for move in moves)
            kind, sides = ["", "1-D", "2-D", "2.5-D"][sum(size > 1 for size in grid)], " x ".join(map(str, grid))
            print(f"{shape!s:20}{devices:7}  {kind:6}{sides:11}{received:11,}{received / bound:12.3f}", end="")
            print(f"  {math.isclose(cost, best)!s:6}{tried:8,}{'' if devices != comm.size else f'  {ran}'}")
    return right


if __name__ == "__main__":
    raise SystemExit(not main())
