"""Plans of loads alone, without a byte read: what they read, in how many reads, what readers receive, and seconds.

python benchmarks/load_plans.py                 all tables
python benchmarks/load_plans.py --seed 7        the random ones of another seed (printed)

orders      random tensors on random meshes, with views and casts: bytes that the busiest device receives over
            those of the best order of axes, of all orders in which readers can have rows (brute force, by the lower
            bound of each order; tensors that no reader has a whole row of are left out)
models      10 layouts x 6 grids of chunks of a model of 163 tensors: bytes read over bytes stored, the largest load
            over the mean, reads over what is allowed (chunks, or bytes / read_size, and one for each reader of a
            file), launches, seconds
large       Llama-3-8B for 64 readers, and 1,000 tensors with shapes of their own on 2,048 devices
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator

import reshard as rs
from reshard.plans.load_plan import LoadPlan
from reshard.plans.rules.bounds import lower_bound
from reshard.plans.stored import ChunkGrid, Stored, StoredPiece
from reshard.synth.reading import ReadOptions, plan_reading
from reshard.synth.reading.as_read import list_idle_axes
from reshard.types.dims import Digit, fit_digits

READ_SIZE = 1 << 20
ITEM = {"bfloat16": 2, "float32": 4, "int8": 1}


def store_rows(name: str, shape: tuple[int, ...], dtype: str, at: int = 0, file: int = 0) -> Stored:
    """A raw tensor in one piece."""
    piece = StoredPiece(tuple((0, size) for size in shape), file, at, ITEM[dtype] * math.prod(shape))
    return Stored(name, dtype, shape, (piece,))


# Orders of axes.


def draw_tensor(rng: random.Random) -> tuple[Stored, rs.Move, dict[int, int] | None]:
    """A tensor of at least a few MiB, what becomes of it, and the process of each device."""
    mesh = rs.Mesh(dict(zip("abcd", rng.choice([(2, 2), (4, 2), (2, 3, 2), (2, 2, 2, 2), (8, 2), (3, 4)]))))  # noqa: B905
    heads, size = rng.choice([4, 6, 8, 12, 16, 32]), rng.choice([64, 128, 160])
    shape = rng.choice([(heads * size, 4096), (4096, heads * size), (rng.randint(500, 9000), 1000), (32000, 1024)])
    dtype, axes = rng.choice(["bfloat16", "float32"]), list(mesh.axes)
    stored = store_rows("w", shape, dtype)

    def spec(rank: int, dims: tuple[int, ...]) -> list[list[str]]:
        by_dim: list[list[str]] = [[] for _ in range(rank)]
        for axis in rng.sample(axes, len(axes)):
            if rng.random() < 0.65:
                by_dim[rng.choice(dims)].append(axis)
        return by_dim

    process_of = rng.choice([None, None, {device: device // 2 for device in mesh.devices}])
    goal = dtype if rng.random() < 0.7 else rng.choice(["float32", "bfloat16"])
    kind = rng.random()
    if kind < 0.5:
        move = rs.Move(stored.as_stored, rs.Layout.from_spec(mesh, shape, goal, spec(2, (0, 1))), cast=goal != dtype)
    elif kind < 0.75:
        turned = rs.Layout.from_spec(mesh, shape[::-1], goal, spec(2, (0, 1)))
        move = rs.Move(stored.as_stored, turned, view="a b -> b a", cast=goal != dtype)
    else:  # Heads, or a third of a fused array.
        parts = next(n for n in (heads, 4, 2, 1) if shape[0] % n == 0)
        whole = (parts, shape[0] // parts, shape[1])
        stack, into = ((3, *whole), {"t": 1}) if rng.random() < 0.5 else (whole, None)
        layout = rs.Layout.from_spec(mesh, stack, goal, spec(len(stack), (len(stack) - 3, len(stack) - 1)))
        view = "(h d) m -> t h d m" if into else "(h d) m -> h d m"
        sizes = {"h": parts, **({"t": 3} if into else {})}
        move = rs.Move(stored.as_stored, layout, view=view, into=into, cast=goal != dtype, **sizes)
    return stored, move, process_of


def received_by_best_order(stored: Stored, move: rs.Move) -> int | None:
    """The least that the busiest device receives, over all orders of all axes by which rows are cut."""
    mesh = move.target.mesh
    axes = list_idle_axes(mesh, ())
    if math.prod(axis.size for axis in axes) > stored.shape[0]:
        return None
    least: int | None = None
    for order in itertools.permutations(axes):
        piece = -(-stored.shape[0] // mesh.size)
        rows = fit_digits([*(Digit(axis.size, axis) for axis in order), Digit(piece, None)], stored.shape[0])
        rest = rs.Layout.from_spec(mesh, stored.shape, stored.dtype, []).dims[1:]
        layout = rs.Layout(mesh, (rows, *rest), stored.dtype)
        bytes_ = lower_bound(layout, move.target, None if move.view.plain else move.view)
        least = bytes_ if least is None else min(least, bytes_)
    return least


def compare_orders(seed: int, count: int) -> None:
    """Random tensors, each alone: received over the best order's, and the largest load over the mean."""
    rng = random.Random(seed)
    ratios: list[float] = []
    loads: list[float] = []
    sums = [0, 0]
    worst = ""
    for _ in range(count):
        stored, move, process_of = draw_tensor(rng)
        plan = plan_reading({"w": stored}, {"w": move}, {}, {}, process_of, ReadOptions())
        totals = plan.read_bytes.values()
        processes = len({*process_of.values()}) if process_of else move.target.mesh.size
        loads.append(max(totals) * processes / sum(totals))
        best = None if process_of else received_by_best_order(stored, move)
        if best is None:
            continue
        sums[0] += plan.received_bytes
        sums[1] += best
        ratio = plan.received_bytes / best if best else 1.0 if not plan.received_bytes else math.inf
        if not ratios or ratio > max(ratios):
            worst = f"{stored.dtype}{list(stored.shape)} -> {move.target} on {move.target.mesh}, {move.view}"
        ratios.append(ratio)
    share = sum(ratio > 1.05 for ratio in ratios) / len(ratios)
    print(f"orders, seed {seed}: {count} tensors, {len(ratios)} with each device a process")
    print(
        f"  received / best order: all together {sums[0] / sums[1]:.3f}, median {statistics.median(ratios):.3f}, "
        f"max {max(ratios):.3f}, above 1.05: {share:.1%}"
    )
    print(f"  worst: {worst}")
    print(f"  largest load / mean: median {statistics.median(loads):.3f}, max {max(loads):.3f}")


# Models.


def list_shapes(layers: int, hidden: int, inner: int, vocabulary: int, heads: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama-like model with a quarter as many heads of keys and values."""
    shapes = {"embed": (vocabulary, hidden), "norm": (hidden,), "lm_head": (vocabulary, hidden)}
    for layer in range(layers):
        for name in ("q", "o"):
            shapes[f"{layer}.{name}"] = (hidden, hidden)
        for name in ("k", "v"):
            shapes[f"{layer}.{name}"] = (hidden // heads * max(1, heads // 4), hidden)
        for name in ("gate", "up"):
            shapes[f"{layer}.{name}"] = (inner, hidden)
        shapes[f"{layer}.down"] = (hidden, inner)
        for name in ("input_norm", "post_norm", "q_bias"):
            shapes[f"{layer}.{name}"] = (hidden,)
    return shapes


GRIDS = {
    "safetensors": None,
    "npy": None,
    "dcp 4x2": (4, 2),
    "zarr 1 MiB": 1 << 20,
    "orbax 8": (8, 1),
    "hdf5 odd": "odd",
}
"""Of each format the chunks: None for one raw piece, numbers of raw parts, bytes of coded chunks, odd coded ones."""


def store_model(shapes: dict[str, tuple[int, ...]], grid: object, size: int = 1 << 30) -> dict[str, Stored]:
    """The tensors of a model in files of at most so many bytes, in the grid of a format."""
    stored: dict[str, Stored] = {}
    at, file = 0, 0
    for name in sorted(shapes):
        shape = shapes[name]
        nbytes = 2 * math.prod(shape)
        if at and at + nbytes > size:
            at, file = 0, file + 1
        if grid is None:
            stored[name] = store_rows(name, shape, "bfloat16", at, file)
        elif isinstance(grid, tuple) and grid == (4, 2):
            counts = (*grid, *(1,) * len(shape))[: len(shape)]
            chunks = tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))
            made = ChunkGrid(shape, chunks, 2 * math.prod(chunks))
            pieces, offset = [], at
            for piece in made:
                length = 2 * math.prod(stop - start for start, stop in piece.box)
                pieces.append(StoredPiece(piece.box, file, offset, length))
                offset += length
            stored[name] = Stored(name, "bfloat16", shape, tuple(pieces), chunks)
        else:
            if isinstance(grid, tuple):
                counts = (*grid, *(1,) * len(shape))[: len(shape)]
                chunks = tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))
            elif grid == "odd":
                chunks = tuple(max(1, size * 3 // 17) for size in shape)
            else:
                rows = max(1, min(shape[0], (1 << 20) // (2 * math.prod(shape[1:]))))
                chunks = (rows, *shape[1:])
            stored[name] = Stored(name, "bfloat16", shape, ChunkGrid(shape, chunks, 2 * math.prod(chunks)), chunks)
        at += nbytes
    return stored


LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "tp8": ({"tp": 8}, "tp"),
    "2 x tp4": ({"rep": 2, "tp": 4}, "tp"),
    "4 x tp2": ({"tp": 2, "rep": 4}, "tp"),
    "replicated": ({"rep": 8}, ""),
    "fsdp8": ({"fsdp": 8}, "fsdp"),
    "hsdp 2 x 4": ({"rep": 2, "fsdp": 4}, "fsdp"),
    "fsdp4 x tp2": ({"fsdp": 4, "tp": 2}, "2d"),
    "2 x fsdp2 x tp2": ({"rep": 2, "fsdp": 2, "tp": 2}, "2d"),
    "tp6": ({"tp": 6}, "tp"),
    "fsdp64": ({"fsdp": 64}, "fsdp"),
}


def lay_out_model(shapes: dict[str, tuple[int, ...]], layout: str) -> dict[str, rs.Layout]:
    """Each tensor as the layout has it: TP by columns and rows, FSDP by rows."""
    axes, kind = LAYOUTS[layout]
    mesh, made = rs.Mesh(axes), {}
    for name, shape in shapes.items():
        rows = name.rpartition(".")[2] in ("o", "down")
        spec: list[list[str]] = [[] for _ in shape]
        if kind == "fsdp":
            spec[0] = ["fsdp"]
        elif kind and len(shape) > 1:
            spec[int(rows)] = ["tp"]
            spec[int(not rows)] = ["fsdp"] if kind == "2d" else []
        made[name] = rs.Layout.from_spec(mesh, shape, "bfloat16", spec)
    return made


def allowed_reads(stored: dict[str, Stored], readers: int) -> int:
    """Chunks, or bytes / read_size, and one for each reader of each file."""
    files = {piece.file for each in stored.values() for piece in each.pieces[:1]}
    allowed = readers * max(1, len(files))
    for each in stored.values():
        raw = not isinstance(each.pieces, ChunkGrid)
        allowed += max(
            len(each.pieces) if len(each.pieces) > 1 else 0, each.nbytes // READ_SIZE if raw else len(each.pieces)
        )
    return allowed


def compare_models() -> None:
    """10 layouts x 6 grids."""
    shapes = list_shapes(16, 2048, 5632, 32000, 16)
    print(f"\nmodels: {len(shapes)} tensors, {2 * sum(map(math.prod, shapes.values())) / 2**30:.2f} GiB")
    print(
        f"  {'layout':16} {'format':12} {'read':>5} {'load':>5} {'reads':>11} {'received':>9} {'bound':>9} "
        f"{'launches':>8} {'waves':>5} {'s':>5}"
    )
    for layout, (grid_name, grid) in itertools.product(LAYOUTS, GRIDS.items()):
        stored = store_model(shapes, grid)
        goals = lay_out_model(shapes, layout)
        moves = {name: rs.Move(each.as_stored, goals[name]) for name, each in stored.items()}
        begin = time.perf_counter()
        plan = plan_reading(stored, moves, {}, {}, None, ReadOptions())
        seconds = time.perf_counter() - begin
        readers = next(iter(goals.values())).mesh.size
        sizes = [plan.read_bytes.get(at, 0) for at in range(readers)]
        reads, load = (sum(plan.reads.values()), allowed_reads(stored, readers)), max(sizes) * readers / sum(sizes)
        print(
            f"  {layout:16} {grid_name:12} {sum(sizes) / plan.stored_bytes:5.2f} {load:5.2f} "
            f"{reads[0]:5}/{reads[1]:5} {plan.received_bytes / 2**20:8.1f}M {plan.lower_bound_bytes / 2**20:8.1f}M "
            f"{plan.launches:8} {len(plan.waves):5} {seconds:5.2f}"
        )


def plan_large(seed: int) -> None:
    """A real model for 64 readers, and many tensors with shapes of their own on many devices."""
    print("\nlarge:")
    for name, plan, seconds in _list_large(seed):
        sizes = plan.read_bytes.values()
        print(
            f"  {name}: {seconds:.2f} s, {plan.launches} launches, {len(plan.waves)} waves, received "
            f"{plan.received_bytes / 2**20:.1f} MiB (bound {plan.lower_bound_bytes / 2**20:.1f}), "
            f"{sum(plan.reads.values())} reads, load {max(sizes) * len(sizes) / sum(sizes):.3f}"
        )


def _list_large(seed: int) -> Iterator[tuple[str, LoadPlan, float]]:
    rng = random.Random(seed)
    shapes = list_shapes(32, 4096, 14336, 128256, 32)
    stored = store_model(shapes, None, 5 << 30)
    for name, axes, kind in (("rep 8 x tp8", {"rep": 8, "tp": 8}, "tp"), ("fsdp64", {"fsdp": 64}, "fsdp")):
        LAYOUTS["large"] = axes, kind
        goals = lay_out_model(shapes, "large")
        moves = {each: rs.Move(stored[each].as_stored, goals[each]) for each in stored}
        begin = time.perf_counter()
        plan = plan_reading(stored, moves, {}, {}, None, ReadOptions())
        yield f"Llama-3-8B for 64 readers, {name}", plan, time.perf_counter() - begin
    own = {f"w{at}": (rng.randrange(256, 8192), 8 * rng.randrange(32, 1024)) for at in range(1000)}
    for title, many in (("even", {n: (-(-r // 256) * 256, c) for n, (r, c) in own.items()}), ("uneven", own)):
        stored = store_model(many, None, 5 << 30)
        mesh = rs.Mesh(rep=8, fsdp=32, tp=8)
        moves = {
            name: rs.Move(each.as_stored, rs.Layout.from_spec(mesh, each.shape, "bfloat16", ["fsdp", "tp"]))
            for name, each in stored.items()
        }
        begin = time.perf_counter()
        plan = plan_reading(stored, moves, {}, {}, None, ReadOptions())
        yield f"1,000 tensors of {title} shapes of their own, 2,048 devices", plan, time.perf_counter() - begin


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--only", choices=["orders", "models", "large"])
    options = parser.parse_args()
    if options.only in (None, "orders"):
        compare_orders(options.seed, options.count)
    if options.only in (None, "models"):
        compare_models()
    if options.only in (None, "large"):
        plan_large(options.seed)


if __name__ == "__main__":
    main()
