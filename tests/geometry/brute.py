"""An exchange of boxes worked out device by device from the meaning of layouts, to compare the fast figures with."""

from __future__ import annotations

from collections import Counter
from itertools import product

from reshard.geometry.blocks import Block
from reshard.types.layout import Layout
from reshard.types.meaning import meaning

Element = tuple[int, ...]
"""A global index, with the number of the summand in a partial array."""


def elements(layout: Layout, device: int, summand: tuple[int, ...] = ()) -> frozenset[Element]:
    """The true elements that a device holds."""
    dims = zip(meaning(layout, device), layout.shape, strict=True)
    return frozenset((*summand, *index) for index in product(*([i for i in along if i < size] for along, size in dims)))


def summand(layout: Layout, device: int) -> tuple[int, ...]:
    """Which summand of a partial array a device holds: its coordinates along the partial sub-axes."""
    position = layout.mesh.position(device)
    return tuple(position // layout.mesh.stride(axis) % axis.size for axis in layout.partial)


def home_tiles(layout: Layout) -> dict[int, tuple[object, ...]]:
    """Per device a name of its tile, equal for devices that hold the same tile; tiles of padding alone differ too."""
    return {device: (*summand(layout, device), meaning(layout, device)) for device in layout.mesh.devices}


def requests(source: Layout, target: Layout) -> dict[tuple[int, tuple[object, ...]], int]:
    """(receiver, source tile) -> elements in common, for every tile that a device's target overlaps."""
    tiles = home_tiles(source)
    held = {tile: elements(source, device, summand(source, device)) for device, tile in tiles.items()}
    common = {}
    for device in target.mesh.devices:
        needed = elements(target, device, summand(source, device))
        for tile, there in held.items():
            if needed & there:
                common[device, tile] = len(needed & there)
    return common


def rounds(source: Layout, target: Layout) -> int:
    """The most messages of a device when the requests for a tile are dealt evenly among its holders."""
    tiles = home_tiles(source)
    sent = {key: size for key, size in requests(source, target).items() if tiles[key[0]] != key[1]}
    received = Counter(device for device, _ in sent)
    asked_of = Counter(tile for _, tile in sent)
    holders = Counter(tiles.values())
    return max([0, *received.values(), *(-(-count // holders[tile]) for tile, count in asked_of.items())])


def largest_message(source: Layout, target: Layout) -> int:
    """The elements of the largest message between two different devices."""
    tiles = home_tiles(source)
    return max((size for (device, tile), size in requests(source, target).items() if tiles[device] != tile), default=0)


def fewest_received(source: Layout, target: Layout) -> int:
    """The most elements that a device needs and does not hold."""
    return max(
        len(elements(target, device, summand(source, device)) - elements(source, device, summand(source, device)))
        for device in target.mesh.devices
    )


def offsets(block: Block) -> list[tuple[int, int]]:
    """The (sender's, receiver's) offset of every element of a block, in order."""
    pairs = [(block.src, block.dst)]
    for extent, src, dst in block.axes:
        pairs = [(at + n * src, to + n * dst) for at, to in pairs for n in range(extent)]
    return pairs
