"""A plan as the reads that a NIXL agent posts, without NIXL: addresses and lengths in bytes, each beside its peer's.

    python examples/nixl_reads.py

A server pulls: for each run of neighbours it reads from an address of the trainer's tile into one of its own. The lists
are what `nixl_agent.get_xfer_descs` takes, (address, length, device) for either side; both have the same order.
"""

import itertools
from collections.abc import Iterator, Mapping

import reshard as rs
from reshard.plans.descriptors import Descriptor

Read = tuple[int, int, int, int]
"""The peer, the address there, the address here, and the length in bytes."""


def list_reads(plan: rs.Plan, device: int, addresses: Mapping[int, int]) -> list[Read]:
    """What a device reads from others, given where each device's tile begins; for plans of one turn."""
    (turn,) = plan.schedule_for(device)
    size = plan.source.nbytes(1)
    return [
        (each.source_device, addresses[each.source_device] + size * src, addresses[device] + size * dst, size * length)
        for each in turn.receives
        for src, dst, length in list_runs(each)
    ]


def list_runs(each: Descriptor) -> Iterator[tuple[int, int, int]]:
    """The runs of neighbours of a transfer: where each begins in either flat tile, and its length, in elements."""
    loops = list(zip(each.extents, each.source_strides, each.target_strides, strict=True))
    length = loops.pop()[0] if loops and loops[-1][1:] == (1, 1) else 1
    for at in itertools.product(*(range(extent) for extent, _, _ in loops)):
        src = each.source_offset + sum(i * stride for i, (_, stride, _) in zip(at, loops, strict=True))
        dst = each.target_offset + sum(i * stride for i, (_, _, stride) in zip(at, loops, strict=True))
        yield src, dst, length


def main() -> None:
    """Prints the reads of a server with half of the columns, from trainers with half of the rows each."""
    trainer, server = rs.Mesh(fsdp=2), rs.Mesh({"tp": 2}, device_ids=[2, 3])
    plan = rs.plan(rs.Layout.parse("bf16[{fsdp}4, 6]", trainer), rs.Layout.parse("bf16[8, {tp}3]", server))
    print(rs.verify(plan.to_descriptors(), plan.source, plan.target))
    addresses = {device: 0x1000 * (1 + device) for device in range(4)}
    for peer, there, here, length in list_reads(plan, 3, addresses):
        print(f"read {length} B at {there:#x} of device {peer} into {here:#x}")


if __name__ == "__main__":
    main()
