"""Weights from a trainer's tree to a server's: `redistribute` beside what one writes without it, 8 CPU devices.

    python benchmarks/weights.py                       all cases
    python benchmarks/weights.py fuse split --repeats 20
    python benchmarks/weights.py --mpi                 over MPI, 4 ranks, beside numpy by hand

JAX: by hand is `jax.device_put` of all arrays in one call, and one jitted program on the target's devices that
concatenates, splits, stacks or takes apart, with `out_shardings`; or that program on the source's devices first: the
better one counts. For each case a line for arrays that are moved for
the first time, as after each step of training, and one for the same arrays moved again: `device_put` keeps a copy of
each array that it has moved once. Milliseconds, the least and the median of calls that take turns in one process, and
the ratio of the least ones; CPU is the ratio of the least CPU times. `peak` is what the process needs at most, beside
the sources, over the bytes of the results, in MiB, by hand and by `redistribute`. Every result is checked once.

MPI: the cases `sixty`, `fuse` and `split` on 4 ranks, which are both trainer and server. By hand all parts for a rank
are packed into one buffer by numpy, go in one Alltoallv, and are unpacked into new arrays, a fused one at once. The
figure of a call is the slowest rank's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

DEVICES, RANKS = 8, 4
LAYERS = 10
Tree = dict[str, Any]
Move = Callable[[Tree], Tree]


class Case(NamedTuple):
    """A tree of arrays, the ways to move it, and the values of its result."""

    sources: Tree
    ways: dict[str, Move]
    wanted: dict[str, np.ndarray]


def values_of(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---- JAX -------------------------------------------------------------------------------------------


class Devices:
    """A trainer on 2 x 2 devices, and a server on the 4 others; `whole` is a mesh of all."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import Mesh

        grid = np.array(jax.devices()[:DEVICES])
        self.trainer = Mesh(grid[:4].reshape(2, 2), ("fsdp", "tp"))
        self.server = Mesh(grid[4:], ("tp",))
        self.whole = Mesh(grid.reshape(4, 2), ("fsdp", "tp"))


def place(values: dict[str, np.ndarray], mesh: Any, specs: dict[str, Any]) -> Tree:
    import jax
    from jax.sharding import NamedSharding

    return {name: jax.device_put(value, NamedSharding(mesh, specs[name])) for name, value in values.items()}


def by_hand(targets: Tree, made: Callable[[Tree], Tree], held: Tree, near: Any) -> dict[str, Move]:
    """`jax.device_put` to `held` and a program on the target's devices, or a program on the source's and then it."""
    import jax

    after, before = jax.jit(made, out_shardings=targets), jax.jit(made, out_shardings=near)
    return {
        "put first": lambda tree: after(jax.device_put(tree, held)),
        "put last": lambda tree: jax.device_put(before(tree), targets),
    }


def ours(targets: Tree) -> Move:
    from reshard.jax import redistribute

    return lambda tree: redistribute(tree, targets)


def plain_case(mesh: Any, target: Any, values: dict[str, np.ndarray], near: Tree, far: Tree) -> Case:
    """Arrays that stay as they are."""
    import jax
    from jax.sharding import NamedSharding

    targets = {name: NamedSharding(target, spec) for name, spec in far.items()}
    ways = {"put": lambda tree: jax.device_put(tree, targets), "redistribute": ours(targets)}
    return Case(place(values, mesh, near), ways, values)


def sixty(on: Devices) -> Case:
    """60 arrays of 95 MiB in all, 2 x 2 tiles to columns on the other devices."""
    from jax.sharding import PartitionSpec as P

    values = {f"w{at}": values_of((640, 648), at) for at in range(60)}
    return plain_case(
        on.trainer, on.server, values, dict.fromkeys(values, P("fsdp", "tp")), dict.fromkeys(values, P(None, "tp"))
    )


def llama_values() -> tuple[dict[str, np.ndarray], Tree, Tree]:
    """291 arrays like those of Llama in 32 small layers, 90 MiB, with a trainer's specs and a server's."""
    from jax.sharding import PartitionSpec as P

    model, hidden, heads, vocabulary = 256, 704, 64, 2048
    layer = {
        "attn.q": ((model, model), P("fsdp", "tp"), P(None, "tp")),
        "attn.k": ((model, heads), P("fsdp", "tp"), P(None, "tp")),
        "attn.v": ((model, heads), P("fsdp", "tp"), P(None, "tp")),
        "attn.o": ((model, model), P("tp", "fsdp"), P("tp")),
        "mlp.gate": ((model, hidden), P("fsdp", "tp"), P(None, "tp")),
        "mlp.up": ((model, hidden), P("fsdp", "tp"), P(None, "tp")),
        "mlp.down": ((hidden, model), P("tp", "fsdp"), P("tp")),
        "norm.attn": ((model,), P("fsdp"), P()),
        "norm.mlp": ((model,), P("fsdp"), P()),
    }
    entries = {f"layers.{at}.{name}": each for at in range(32) for name, each in layer.items()}
    entries |= {
        "embed": ((vocabulary, model), P("tp", "fsdp"), P("tp")),
        "head": ((model, vocabulary), P("fsdp", "tp"), P(None, "tp")),
        "norm": ((model,), P("fsdp"), P()),
    }
    values = {name: values_of(shape, at) for at, (name, (shape, _, _)) in enumerate(entries.items())}
    return values, {name: each[1] for name, each in entries.items()}, {name: each[2] for name, each in entries.items()}


def llama(on: Devices) -> Case:
    """291 small and medium arrays, from FSDP x TP to TP on the other devices."""
    return plain_case(on.trainer, on.server, *llama_values())


def llama_on_one_set(on: Devices) -> Case:
    """The same arrays, from FSDP x TP on 8 devices to TP with replicas on the same ones."""
    return plain_case(on.whole, on.whole, *llama_values())


QUERY, KEY = 1024, 256


def projections() -> dict[str, np.ndarray]:
    """q, k and v of some layers with grouped heads."""
    rows = {"q": QUERY, "k": KEY, "v": KEY}
    return {f"{at}.{n}": values_of((rows[n], 1024), 3 * at + "qkv".index(n)) for at in range(LAYERS) for n in "qkv"}


def fused_of(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{at}.qkv": np.concatenate([values[f"{at}.{n}"] for n in "qkv"]) for at in range(LAYERS)}


def windows() -> dict[str, slice]:
    return {"q": slice(0, QUERY), "k": slice(QUERY, QUERY + KEY), "v": slice(QUERY + KEY, QUERY + 2 * KEY)}


def fuse(on: Devices) -> Case:
    """q, k, v of 10 layers into one array each, on the other devices."""
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from reshard.jax import Part, Target

    values, far = projections(), NamedSharding(on.server, P("tp"))
    shape = (QUERY + 2 * KEY, 1024)
    targets = {
        f"{at}.qkv": Target(far, shape=shape, parts=[Part(f"{at}.{n}", into={0: w}) for n, w in windows().items()])
        for at in range(LAYERS)
    }

    def concatenated(tree: Tree) -> Tree:
        return {f"{at}.qkv": jnp.concatenate([tree[f"{at}.{n}"] for n in "qkv"]) for at in range(LAYERS)}

    hand = by_hand(
        dict.fromkeys(targets, far),
        concatenated,
        dict.fromkeys(values, far),
        NamedSharding(on.trainer, P("tp", "fsdp")),
    )
    sources = place(values, on.trainer, dict.fromkeys(values, P("tp", "fsdp")))
    return Case(sources, {**hand, "redistribute": ours(targets)}, fused_of(values))


def split(on: Devices) -> Case:
    """And back: from the server's fused arrays to q, k and v of the trainer."""
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from reshard.jax import Target

    values, far = projections(), NamedSharding(on.trainer, P("tp", "fsdp"))
    targets = {
        f"{at}.{n}": Target(far, source=f"{at}.qkv", take={0: window})
        for at in range(LAYERS)
        for n, window in windows().items()
    }

    def taken(tree: Tree) -> Tree:
        return {f"{at}.{n}": tree[f"{at}.qkv"][w] for at in range(LAYERS) for n, w in windows().items()}

    fused = fused_of(values)
    hand = by_hand(dict.fromkeys(targets, far), taken, dict.fromkeys(fused, far), NamedSharding(on.server, P("tp")))
    sources = place(fused, on.server, dict.fromkeys(fused, P("tp")))
    return Case(sources, {**hand, "redistribute": ours(targets)}, values)


def grouped(on: Devices) -> Case:
    """q, k, v of arrays that hold them group by group, as Megatron's do: 4 heads of q, one of k and one of v."""
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from reshard.jax import Target

    groups, wide, model = 4, 64, 1024
    fused = {f"{at}.qkv": values_of((groups * 6 * wide, model), at) for at in range(LAYERS)}
    far = NamedSharding(on.server, P("tp"))
    heads = {"q": slice(0, 4), "k": slice(4, 5), "v": slice(5, 6)}
    targets = {
        f"{at}.{n}": Target(
            far, source=f"{at}.qkv", view="(g h d) m -> (g h d) m", take={"h": part}, g=groups, h=6, d=wide
        )
        for at in range(LAYERS)
        for n, part in heads.items()
    }

    def taken(tree: Tree) -> Tree:
        opened = {name: x.reshape(groups, 6, wide, model) for name, x in tree.items()}
        return {
            f"{at}.{n}": opened[f"{at}.qkv"][:, p].reshape(-1, model) for at in range(LAYERS) for n, p in heads.items()
        }

    hand = by_hand(
        dict.fromkeys(targets, far), taken, dict.fromkeys(fused, far), NamedSharding(on.trainer, P("fsdp", "tp"))
    )
    sources = place(fused, on.trainer, dict.fromkeys(fused, P("fsdp", "tp")))
    return Case(sources, {**hand, "redistribute": ours(targets)}, taken(fused))


EXPERTS, EXPERT = 8, (512, 768)


def experts_of() -> dict[str, np.ndarray]:
    return {f"{at}.experts.{e}": values_of(EXPERT, EXPERTS * at + e) for at in range(4) for e in range(EXPERTS)}


def stack(on: Devices) -> Case:
    """8 experts of 4 layers as one array for each layer, each of whose devices has 2 of them."""
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from reshard.jax import Part, Target

    values, far = experts_of(), NamedSharding(on.server, P("tp"))
    targets = {
        f"{at}.experts": Target(
            far,
            shape=(EXPERTS, *EXPERT),
            parts=[Part(f"{at}.experts.{e}", view="m f -> e m f", into={"e": e}, e=EXPERTS) for e in range(EXPERTS)],
        )
        for at in range(4)
    }

    def stacked(tree: Tree) -> Tree:
        return {f"{at}.experts": jnp.stack([tree[f"{at}.experts.{e}"] for e in range(EXPERTS)]) for at in range(4)}

    held = NamedSharding(on.server, P(None, "tp"))
    hand = by_hand(
        dict.fromkeys(targets, far),
        stacked,
        dict.fromkeys(values, held),
        NamedSharding(on.trainer, P(None, "fsdp", "tp")),
    )
    wanted = {name: np.asarray(x) for name, x in stacked(values).items()}
    sources = place(values, on.trainer, dict.fromkeys(values, P("fsdp", "tp")))
    return Case(sources, {**hand, "redistribute": ours(targets)}, wanted)


def unstack(on: Devices) -> Case:
    """And back: each expert an array of its own, on the trainer's devices."""
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from reshard.jax import Target

    values, far = experts_of(), NamedSharding(on.trainer, P("fsdp", "tp"))
    targets = {
        f"{at}.experts.{e}": Target(far, source=f"{at}.experts", view="e m f -> m f", take={"e": e})
        for at in range(4)
        for e in range(EXPERTS)
    }
    joined = {f"{at}.experts": np.stack([values[f"{at}.experts.{e}"] for e in range(EXPERTS)]) for at in range(4)}

    def taken(tree: Tree) -> Tree:
        return {f"{at}.experts.{e}": tree[f"{at}.experts"][e] for at in range(4) for e in range(EXPERTS)}

    held = NamedSharding(on.trainer, P(None, "fsdp", "tp"))
    hand = by_hand(dict.fromkeys(targets, far), taken, dict.fromkeys(joined, held), NamedSharding(on.server, P("tp")))
    sources = place(joined, on.server, dict.fromkeys(joined, P("tp")))
    return Case(sources, {**hand, "redistribute": ours(targets)}, values)


CASES: tuple[Callable[[Devices], Case], ...] = (
    sixty,
    llama,
    llama_on_one_set,
    fuse,
    split,
    grouped,
    stack,
    unstack,
)


class Taken(NamedTuple):
    """What a call takes: seconds, seconds of all CPUs."""

    wall: float
    cpu: float


def time_ways(case: Case, repeats: int, anew: bool) -> dict[str, list[Taken]]:
    """What calls of each way take, in turns; `anew`, each call has arrays of its own."""
    import jax

    held = {name: x.sharding for name, x in case.sources.items()}
    copied = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0.0, tree), out_shardings=held)
    times: dict[str, list[Taken]] = {name: [] for name in case.ways}
    shuffle = random.Random(0)
    for turn in range(repeats + 1):
        # In any order: what a way frees, the next one may take, or the system may have it back.
        for name, way in shuffle.sample(list(case.ways.items()), len(case.ways)):
            tree = jax.block_until_ready(copied(case.sources)) if anew else case.sources
            cpu, start = time.process_time(), time.perf_counter()
            moved = jax.block_until_ready(way(tree))
            if turn:  # The first call compiles.
                times[name].append(Taken(time.perf_counter() - start, time.process_time() - cpu))
            del moved, tree
    return times


def measure_peak(way: Move, sources: Tree) -> float:
    """MiB that a call needs at most beside its sources and results."""
    import jax

    copied = jax.block_until_ready(jax.tree.map(lambda x: x + 0.0, sources))
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # Memory that is free already does not count as the call's.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _read_status("VmRSS")
    moved = jax.block_until_ready(way(copied))
    held = {s.data.unsafe_buffer_pointer(): s.data.nbytes for x in moved.values() for s in x.addressable_shards}
    return (_read_status("VmHWM") - before - sum(held.values())) / 2**20


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def show_jax(names: list[str], repeats: int) -> None:
    """Prints two lines a case."""
    import jax

    print(f"{'':18}{'':7}{'by hand':>17}{'redistribute':>17}  ratio   CPU{'peak':>11}   (jax {jax.__version__})")
    for make in (case for case in CASES if not names or case.__name__ in names):
        case = make(Devices())
        for way in case.ways.values():
            moved = way(case.sources)
            assert moved.keys() == case.wanted.keys()
            assert all(np.array_equal(moved[name], case.wanted[name]) for name in moved), "a wrong element"
            del moved
        peaks = {name: measure_peak(way, case.sources) for name, way in case.ways.items()}
        for anew in (True, False):
            times = time_ways(case, repeats, anew)
            least = {name: 1e3 * min(each.wall for each in of) for name, of in times.items()}
            middle = {name: 1e3 * statistics.median(each.wall for each in of) for name, of in times.items()}
            cpu = {name: min(each.cpu for each in of) for name, of in times.items()}
            own = "redistribute"
            hand = min(least.keys() - {own}, key=lambda name: least[name])
            cells = "".join(f"{least[name]:>8.1f} {middle[name]:>7.1f} " for name in (hand, own))
            room = f"{peaks[hand]:>6.0f}{peaks[own]:>5.0f}  {hand}" if anew else f"{'':11}  {hand}"
            label = "new" if anew else "again"
            ratios = f"{least[own] / least[hand]:>5.2f} {cpu[own] / cpu[hand]:>5.2f}"
            print(f"{make.__name__:18}{label:7}{cells}  {ratios}{room}", flush=True)


# ---- MPI -------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """An array of this shape, its dims cut into so many pieces, the ranks in the order of these."""

    shape: tuple[int, int]
    counts: tuple[int, int]

    def box(self, rank: int) -> tuple[slice, ...]:
        """The rank's part of the array."""
        at = divmod(rank, self.counts[1])
        sizes = [size // count for size, count in zip(self.shape, self.counts, strict=True)]
        return tuple(slice(n * size, n * size + size) for n, size in zip(at, sizes, strict=True))

    def layout(self) -> Any:
        from reshard import Layout, Mesh

        return Layout.from_spec(Mesh(a=self.counts[0], b=self.counts[1]), self.shape, "float32", [["a"], ["b"]])


class RankCase(NamedTuple):
    """Arrays from one set of tiles to another: each move reads rows of an array and fills rows of one."""

    values: dict[str, np.ndarray]
    near: dict[str, Tiles]
    far: dict[str, Tiles]
    moves: dict[str, tuple[str, slice, str, slice]]


def rank_cases() -> dict[str, RankCase]:
    """The cases by name: from 2 x 2 tiles to 4, and back."""
    square, rows, columns = (2, 2), (4, 1), (1, 4)
    values = {f"w{at}": values_of((640, 648), at) for at in range(60)}
    every = slice(0, 640)
    tiles = Tiles((640, 648), square)
    plain = RankCase(
        values,
        dict.fromkeys(values, tiles),
        dict.fromkeys(values, tiles._replace(counts=columns)),
        {name: (name, every, name, every) for name in values},
    )
    parts = projections()
    fused = fused_of(parts)
    near = {name: Tiles(value.shape, square) for name, value in parts.items()}
    far = {name: Tiles(value.shape, rows) for name, value in fused.items()}
    into = {f"{at}.{n}": (f"{at}.qkv", w) for at in range(LAYERS) for n, w in windows().items()}
    whole = {name: slice(0, value.shape[0]) for name, value in parts.items()}
    fuse = RankCase(parts, near, far, {name: (name, whole[name], *into[name]) for name in parts})
    back = RankCase(fused, far, near, {name: (*into[name], name, whole[name]) for name in parts})
    return {"sixty": plain, "fuse": fuse, "split": back}


def pack_by_hand(comm: Any, case: RankCase, tiles: dict[str, np.ndarray]) -> Callable[[], dict[str, np.ndarray]]:
    """The move with numpy and one Alltoallv; what goes where is known before."""

    def boxes(sender: int, receiver: int) -> list[tuple[str, tuple[slice, ...], str, tuple[slice, ...]]]:
        found = []
        for source, taken, target, filled in case.moves.values():
            one, other = case.near[source].box(sender), case.far[target].box(receiver)
            shift = filled.start - taken.start
            low = max(one[0].start, taken.start, other[0].start - shift)
            high = min(one[0].stop, taken.stop, other[0].stop - shift)
            left, right = max(one[1].start, other[1].start), min(one[1].stop, other[1].stop)
            if low < high and left < right:
                near = slice(low - one[0].start, high - one[0].start), slice(left - one[1].start, right - one[1].start)
                start = low + shift - other[0].start
                far = slice(start, start + high - low), slice(left - other[1].start, right - other[1].start)
                found.append((source, near, target, far))
        return found

    gives = [each for rank in range(comm.size) for each in boxes(comm.rank, rank)]
    takes = [each for rank in range(comm.size) for each in boxes(rank, comm.rank)]
    sent, received = (
        [sum((r.stop - r.start) * (c.stop - c.start) for _, (r, c), _, _ in boxes(*ends)) for ends in pairs]
        for pairs in ([(comm.rank, r) for r in range(comm.size)], [(r, comm.rank) for r in range(comm.size)])
    )
    shapes = {name: [s.stop - s.start for s in tiles.box(comm.rank)] for name, tiles in case.far.items()}

    def run() -> dict[str, np.ndarray]:
        send, receive = np.empty(sum(sent), np.float32), np.empty(sum(received), np.float32)
        at = 0
        for source, near, _, _ in gives:
            view = tiles[source][near]
            send[at : at + view.size].reshape(view.shape)[...] = view
            at += view.size
        comm.Alltoallv([send, sent], [receive, received])
        made = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        at = 0
        for _, _, target, far in takes:
            view = made[target][far]
            view[...] = receive[at : at + view.size].reshape(view.shape)
            at += view.size
        return made

    return run


def time_on_rank(repeats: int) -> None:
    """Prints a line a case, on rank 0."""
    from mpi4py import MPI

    from reshard import Move
    from reshard.mpi import redistribute

    comm = MPI.COMM_WORLD
    version = " ".join(MPI.Get_library_version().split()[:3]).rstrip(",")
    if comm.rank == 0:
        print(f"{'':18}{'by hand':>17}{'redistribute':>17}  ratio   ({version}, {comm.size} ranks)", flush=True)
    for name, case in rank_cases().items():
        tiles = {each: case.values[each][of.box(comm.rank)].copy() for each, of in case.near.items()}
        near, far = ({each: of.layout() for each, of in side.items()} for side in (case.near, case.far))
        moves: dict[str, Move] = {}
        for move, (source, taken, target, filled) in case.moves.items():
            parts = {"take": taken, "into": filled}
            whole = {"take": near[source].shape[0], "into": far[target].shape[0]}
            given = {side: {0: rows} for side, rows in parts.items() if rows != slice(0, whole[side])}
            moves[move] = Move(near[source], far[target], **given)
        reads = {move: source for move, (source, _, _, _) in case.moves.items()}
        fills = {move: target for move, (_, _, target, _) in case.moves.items()}
        ways: dict[str, Callable[[], dict[str, np.ndarray]]] = {
            "by hand": pack_by_hand(comm, case, tiles),
            "redistribute": lambda of=(tiles, moves), ends={"sources": reads, "targets": fills}: redistribute(
                *of, None, comm, **ends
            ),
        }
        handed = {way: run() for way, run in ways.items()}
        assert handed["by hand"].keys() == handed["redistribute"].keys()
        assert all(np.array_equal(tile, handed["redistribute"][n]) for n, tile in handed["by hand"].items())
        del handed
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, run in ways.items():
                comm.Barrier()
                start = time.perf_counter()
                made = run()
                times[way].append(1e3 * max(comm.allgather(time.perf_counter() - start)))
                del made
        if comm.rank == 0:
            cells = "".join(f"{min(of):>8.1f} {statistics.median(of):>7.1f} " for of in times.values())
            print(f"{name:18}{cells}  {min(times['redistribute']) / min(times['by hand']):>5.2f}", flush=True)


def main() -> None:
    """Prints the table of JAX, or that of MPI."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(case.__name__ for case in CASES)}")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mpi", action="store_true", help=f"over MPI, on {RANKS} ranks")
    parser.add_argument("--on-a-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        time_on_rank(options.repeats)
        return
    if options.mpi:
        from reshard.mpi import launch

        sys.exit(launch(RANKS, [__file__, "--repeats", str(options.repeats), "--on-a-rank"]))
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = flags.strip()
    show_jax(options.cases, options.repeats)


if __name__ == "__main__":
    main()
