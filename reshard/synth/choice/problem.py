"""What is chosen among: the tensors of a program, and nodes that read and write them and may be split along factors.

A *factor* is a size that an operation's dims share, as in an einsum: `ij,jk->ik` has three. A *node* is one operation,
or several that are always split alike; a *split* of it gives each factor the mesh axes that divide it. So a split says
in which layout the node reads each tensor, and in which it writes each:

    node  `ij,jk->ik`   sizes (8, 16, 32)   reads ((0,), (1,)), ((1,), (2,))   writes ((0,), (2,)) with sums (1,)
    split ("x",), ("y",), ()                on <x=4, y=2>
    reads                                   [{x}2, {y}8]  and  [{y}8, 32]
    writes                                  [{x}2, 32] + sum{y}

Where a tensor is written in one layout and read in another, a plan moves it between them. The choice is of one split
for each node, such that all moves and all work take the least time and no device holds more than the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from reshard.types.dims import Digit, Dim
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis

LANES = 128
"""Elements that lie side by side in the memory of a TPU."""

Split: TypeAlias = tuple[tuple[str, ...], ...]
"""The mesh axes that split each factor of a node, major first."""


@dataclass(frozen=True)
class Tensor:
    """A value that some node writes: its shape and dtype, and from which position of the program to which it is live.

    Positions number the operations of the program in order, those inside loops included. A tensor that is made outside
    a loop and read inside is live until the loop ends; what a loop carries is live throughout. `joined` says for how
    many tensors, this one among them, one all-reduce would be enough: compilers combine those of all gradients. One
    that is `fused` into whoever reads it takes memory only if it is moved, from where it is made to its last need. Of
    one that is `padded` the last dim of a tile takes whole lanes of memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    born: int
    dies: int
    joined: int = 1
    fused: bool = False
    padded: bool = False

    def count_held(self, layout: Layout) -> int:
        """The bytes that a tile of the tensor takes in a layout."""
        nbytes, last = layout.tile_bytes, layout.tile_shape[-1] if self.padded else 0
        return nbytes // last * -(-last // LANES) * LANES if last else nbytes


@dataclass(frozen=True)
class Access:
    """A tensor as a node reads or writes it: the factors of each dim, major first, none where a dim is never split.

    The tensor is, or becomes, a sum over the axes that split the factors `sums`. The sizes of the factors of a dim
    multiply to its size. `at` is the position of the operation that reads it, or writes it; `times` says how often that
    runs, the trips of the loops around it. `reduction` is the operation that finishes the sum ("sum", "max", ...).
    `held` are the first and last position of the outermost loop around a read in whose body the tensor is not made: it,
    or the copy that is kept for the read, is needed until the loop ends.
    """

    tensor: int
    dims: tuple[tuple[int, ...], ...]
    at: int
    times: int = 1
    sums: tuple[int, ...] = ()
    reduction: str = "sum"
    held: tuple[int, int] | None = None

    @property
    def first(self) -> int:
        """The position, the one before the read, at which a copy is made that is kept, if no other needs it sooner."""
        return (self.at if self.held is None else self.held[0]) - 1

    @property
    def last(self) -> int:
        """The position until which this read needs the tensor, or the copy that is kept for it."""
        return self.at if self.held is None else self.held[1]


@dataclass(frozen=True)
class Node:
    """What is split as one: `sizes` of its factors, of which `splittable` may be split; what it reads and writes.

    `flops` and `touched` are the work of one run on one device if nothing is split: operations are divided by the axes
    of all factors, and bytes by those of the factors beside them, since whoever splits a batch reads all of a weight.
    `times` says how often it runs. A factor of size 0 has any size: it is in no dim, and its axes, which divide
    nothing, say over what the node reads and writes sums (a *linear* node).
    `held_bytes` is what a node holds that does no work, as of an argument; it is divided likewise, and each byte costs
    a little, far less than to move it: of choices that take as long, the one that holds less is better.
    `only` lists the splits that are allowed, None for all; `tie` is a name that nodes share that must be split alike.
    `reuses` has pairs of a read and a write that may lie in the same memory, if the tensor that is read dies there.
    """

    name: str
    sizes: tuple[int, ...]
    splittable: frozenset[int]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: float = 0.0
    touched: tuple[tuple[tuple[int, ...], float], ...] = ()
    times: int = 1
    held_bytes: float = 0.0
    only: tuple[Split, ...] | None = None
    tie: str = ""
    reuses: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Problem:
    """The tensors and nodes of a program on a mesh. Each tensor is written by one node."""

    mesh: Mesh
    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Assignment:
    """A split for each node, and which reads make their own copy.

    Reads of one tensor in one layout share a copy, which is live from the first to the last, except those in `anew`,
    pairs of a node and the number of its read: they move it again, and drop the copy after.

    `seconds` is predicted for the whole program, `move_seconds` for the moves alone; `received_bytes` is what a device
    receives, `peak_bytes` what it holds at most; `bound_seconds` is a lower bound on the seconds of every assignment, 0
    where nobody looked for one.
    """

    splits: tuple[Split, ...]
    anew: frozenset[tuple[int, int]]
    seconds: float
    move_seconds: float
    received_bytes: int
    peak_bytes: int
    bound_seconds: float

    @property
    def gap(self) -> float:
        """By how much the seconds may exceed the best ones: 0.01 for one percent."""
        if self.seconds <= self.bound_seconds:
            return 0.0
        return self.seconds / self.bound_seconds - 1 if self.bound_seconds > 0 else math.inf


def access_layout(problem: Problem, node: Node, access: Access, split: Split) -> Layout:
    """The layout in which a node that is split like this reads or writes a tensor.

    >>> rows = Node("w", (8, 6), frozenset({0, 1}), (), (Access(0, ((0,), (1,)), 0),))
    >>> problem = Problem(Mesh(x=4, y=2), (Tensor("w", (8, 6), "f32", 0, 1),), (rows,))
    >>> str(access_layout(problem, rows, rows.writes[0], (("x",), ("y",))))
    'f32[{x}2, {y}3]'
    """
    tensor = problem.tensors[access.tensor]
    digits = tuple(tuple((node.sizes[factor], split[factor]) for factor in factors) for factors in access.dims)
    partial = tuple(name for factor in access.sums for name in split[factor])
    return _lay_factors(problem.mesh, tensor.shape, tensor.dtype, digits, partial, access.reduction)


@lru_cache(maxsize=1 << 18)  # a program reads the same few layouts at thousands of places, each in many splits
def _lay_factors(
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    factors: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...],
    partial: tuple[str, ...],
    reduction: str,
) -> Layout:
    def lay_dim(size: int, factors: tuple[tuple[int, tuple[str, ...]], ...]) -> Dim:
        digits: list[Digit] = []
        for factor, names in factors:
            axes = [SubAxis(name, 1, mesh.axes[name]) for name in names]
            digits += [Digit(axis.size, axis) for axis in axes]
            digits.append(Digit(factor // math.prod(axis.size for axis in axes), None))
        return Dim(tuple(digits) if factors else (Digit(size, None),), size)

    dims = tuple(lay_dim(size, dim) for size, dim in zip(shape, factors, strict=True))
    sums = tuple(SubAxis(name, 1, mesh.axes[name]) for name in partial)
    return Layout(mesh, dims, dtype, reduction if sums else None, sums)
