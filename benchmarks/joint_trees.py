"""Trees whose tensors have chunk grids and readers of their own: launches, bytes and the time to plan them.

    python benchmarks/joint_trees.py                              1,000 tensors, 1,024 -> 2,048, every kind
    python benchmarks/joint_trees.py --tensors 200 --readers 64 --devices 128 --kinds shared --seed 7

Each tensor of a kind is read by devices of its own: a grid of chunks, dealt to as many readers from a random one on.

    rotated      all readers, in rows, from a random one on; the target is split by tp, and replicated
    grids        chunk grids of at most that many chunks, dealt from a random reader on; likewise
    norms        whole tensors, from one random reader to all devices
    sharded      chunk grids of their own in the order of devices; the target is split over all devices
    mixed        two thirds grids, a third norms

`--apart` has readers and targets on different devices, else readers are among the devices of the target.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

import reshard as rs

KINDS = ("rotated", "grids", "norms", "sharded", "mixed")


def draw_tree(
    rng: random.Random, kind: str, tensors: int, readers: int, devices: int, apart: bool = False
) -> dict[str, tuple[rs.Layout, rs.Layout]]:
    """The moves of one tree."""
    ids = range(readers, readers + devices) if apart else range(devices)
    tp = 8
    target_mesh = rs.Mesh({"rep": devices // tp, "tp": tp}, device_ids=list(ids))
    moves: dict[str, tuple[rs.Layout, rs.Layout]] = {}
    for at in range(tensors):
        which = kind if kind != "mixed" else ("norms" if at % 3 == 2 else "grids")
        start = rng.randrange(readers)
        if which == "norms":
            mesh = rs.Mesh({"r": 1}, device_ids=[start])
            moves[f"t{at}"] = (
                rs.Layout.from_spec(mesh, (4096,), "bfloat16", [[]]),
                rs.Layout.from_spec(target_mesh, (4096,), "bfloat16", [[]]),
            )
            continue
        shape = rng.choice([(4096, 4096), (4096, 14336), (14336, 4096), (1024, 4096)])
        rows = readers
        columns = 1
        if which == "grids":
            rows = 2 ** rng.randrange(readers.bit_length())
            columns = 2 ** rng.randrange((readers // rows).bit_length())
        if which == "sharded":
            rows = 2 ** rng.randrange(readers.bit_length())
            columns, start = readers // rows, 0
        own = [(start + n) % readers for n in range(rows * columns)]
        mesh = rs.Mesh({"c0": rows, "c1": columns}, device_ids=own)
        source = rs.Layout.from_spec(mesh, shape, "bfloat16", [["c0"], ["c1"]])
        split = rng.randrange(2)
        spec = [["tp"] if dim == split else [] for dim in range(2)]
        if which == "sharded":
            spec = [["rep"] if dim != split else ["tp"] for dim in range(2)]
        moves[f"t{at}"] = (source, rs.Layout.from_spec(target_mesh, shape, "bfloat16", spec))
    return moves


def main() -> None:
    """Prints a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=1024)
    parser.add_argument("--devices", type=int, default=2048)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}, {options.tensors} tensors, {options.readers} -> {options.devices} devices")
    for kind in options.kinds:
        moves = draw_tree(
            random.Random(f"{seed} {kind}"), kind, options.tensors, options.readers, options.devices, options.apart
        )
        start = time.process_time()
        tree = rs.plan_tree(moves)
        planned = time.process_time() - start
        start = time.process_time()
        figures = tree.launches, tree.received_bytes, tree.sent_bytes, tree.lower_bound_bytes
        taken = time.process_time() - start
        launches, received, sent, bound = figures
        print(
            f"{kind:8} planned {planned:6.2f} s, figures {taken:6.2f} s, "
            f"{launches} launches in {len(tree.batches)} batches, "
            f"received {received / bound:.3f} and sent {sent / bound:.3f} of the bound, "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
