"""A weight sync that `reshard` plans and torch carries: a trainer's q, k and v become the fused qkv of a server.

    python examples/torch_gloo.py        four processes on this machine: 0 and 1 train, 2 and 3 serve

`carry` is all that a transport has to do; copy it. Nothing in it knows what is moved, or why.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

import reshard as rs
from reshard.plans.descriptors import Descriptor

TRAINER = rs.Mesh(fsdp=2)
SERVER = rs.Mesh({"tp": 2}, device_ids=[2, 3])

SOURCES = {
    "q": rs.Layout.parse("f32[{fsdp}8, 6]", TRAINER),
    "k": rs.Layout.parse("f32[{fsdp}4, 6]", TRAINER),
    "v": rs.Layout.parse("f32[{fsdp}4, 6]", TRAINER),
}
QKV = rs.Layout.parse("f32[{tp}1, 16, 6]", SERVER)  # Each server has its own rows of q, and below them of k and v.
ROWS = {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16)}

MOVES = {
    name: rs.Move(SOURCES[name], QKV, view="(tp r) m -> tp r m", tp=2, into={"r": rows}) for name, rows in ROWS.items()
}


def carry(tree: rs.TreePlan, sources: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    """Runs a plan of many moves: reads this process's tiles of the sources, and fills those of the targets."""
    tiles = {name: sources[array].flatten() for name, array in tree.source_of.items() if array in sources}
    for turn in tree.schedule_for(dist.get_rank()):
        written: dict[str, torch.Tensor] = {}
        calls: list[dist.P2POp] = []
        landings: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, step in turn.items():
            target = tree.target_layouts[tree.target_of[name]]
            if step.last and tree.target_of[name] in targets:
                written[name] = targets[tree.target_of[name]].view(-1)
            else:
                written[name] = torch.empty(step.room, dtype=getattr(torch, target.dtype))
            for each in step.copies:
                pick(written[name], each, "target").copy_(pick(tiles[name], each, "source"))
            for each in step.sends:
                packed = pick(tiles[name], each, "source").contiguous()
                calls.append(dist.P2POp(dist.isend, packed, each.target_device))
            for each in step.receives:
                place = pick(written[name], each, "target")
                landings.append((place, torch.empty(place.shape, dtype=place.dtype)))
                calls.append(dist.P2POp(dist.irecv, landings[-1][1], each.source_device))
        for call in dist.batch_isend_irecv(calls) if calls else []:
            call.wait()
        for place, arrived in landings:
            place.copy_(arrived)
        tiles |= written


def pick(flat: torch.Tensor, each: Descriptor, side: str) -> torch.Tensor:
    """The elements of a transfer, as a view of the flat tile on one of its sides."""
    first = flat.storage_offset() + getattr(each, f"{side}_offset")  # torch counts from where its memory begins.
    return flat.as_strided(each.extents, getattr(each, f"{side}_strides"), first)


def run_rank(rank: int, store: str) -> None:
    """One of the four processes: makes its tiles, carries the plan, and looks at what has arrived."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    whole = {
        name: torch.arange(16 * 6.0).view(16, 6)[: layout.shape[0]] + 100 * at
        for at, (name, layout) in enumerate(SOURCES.items())
    }
    sources = {name: array.chunk(2)[rank].contiguous() for name, array in whole.items() if rank in TRAINER.devices}
    targets = {"qkv": torch.full(QKV.tile_shape, -1.0)} if rank in SERVER.devices else {}

    tree = rs.plan_tree(MOVES, targets=dict.fromkeys(MOVES, "qkv"))  # Every process makes the same plan.
    carry(tree, sources, targets)

    if rank in SERVER.devices:
        wanted = torch.cat([array.chunk(2)[rank - 2] for array in whole.values()])
        assert torch.equal(targets["qkv"][0], wanted), targets["qkv"]
        print(f"rank {rank} has its {len(wanted)} rows of qkv", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (f"{folder}/store",), nprocs=4)
