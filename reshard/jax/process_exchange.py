"""Bytes from the memory of one process to that of others: one program over a device of each process.

    process        0       1       2       3
    1 further      0 -> 1  1 -> 2  2 -> 3  3 -> 0      a permute for each distance at which some process sends, all of
    2 further      0 -> 2  1 -> 3  2 -> 0  3 -> 1      them in one program; messages are as long as the longest

With the messages goes a number of each process, such as that it is ill, so that all stop together when one of them
could not read. Lengths are rounded so that a load needs few programs; `compile_launch` makes one before there is
anything to send.

Only what crosses hosts goes this way; those of one share memory. Beside it, an array as it is read
could be a `jax.Array` for `reshard.jax.redistribute`. Neither is always faster: 279 MiB in 20 tensors, 4 processes with
2 CPU devices, each taken for a host of its own, on 2 cores, seconds of the first load and of the second

    target         this            redistribute     one host
    2 x TP4        1.49   0.62     1.50   0.31      0.25   0.14
    replicated     2.55   0.68     1.80   1.13      0.20   0.10

and this one has views, parts and casts in its copies, needs no program for each shape, and takes the memory of a wave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from reshard.jax import placement

Array = NDArray[Any]
_AXIS = "process"
_LEAST = 64 << 10
_STEPS = 2  # Lengths are halves of the longest: a third program takes longer to compile than bytes in vain to send.


class ByteLaunch(NamedTuple):
    """One run of the program: how many processes further messages go, and the bytes of those of each distance."""

    distances: tuple[int, ...]
    lengths: tuple[int, ...]


LAST = ByteLaunch((), ())
"""That in which processes only say how they are."""


def plan_launches(amounts: Sequence[NDArray[np.int64]]) -> list[ByteLaunch]:
    """The launches of some exchanges, by the bytes that each process sends to each.

    >>> plan_launches([np.array([[0, 0, 9], [9, 0, 0], [0, 9, 0]]), np.zeros((3, 3), np.int64)])
    [ByteLaunch(distances=(2,), lengths=(65536,)), ByteLaunch(distances=(), lengths=())]
    """
    longest = max((int(each.max(initial=0)) for each in amounts), default=0)
    # Rounded up, so that waves of about the same length run one program.
    unit = -(-max(_LEAST, longest // _STEPS) // _LEAST) * _LEAST
    launches: list[ByteLaunch] = []
    for each in amounts:
        senders, receivers = np.nonzero(each)
        longest_of: dict[int, int] = {}
        for sender, receiver in zip(senders.tolist(), receivers.tolist(), strict=True):
            far = (receiver - sender) % len(each)
            longest_of[far] = max(longest_of.get(far, 0), -(-int(each[sender, receiver]) // unit) * unit)
        launches.append(ByteLaunch(tuple(sorted(longest_of)), tuple(longest_of[far] for far in sorted(longest_of))))
    return launches


@lru_cache(maxsize=4)
def exchange_on(devices: tuple[Any, ...]) -> ProcessExchange:
    """The exchange over a device of each process, which keeps its programs for the next load."""
    return ProcessExchange(devices)


class ProcessExchange:
    """The exchange between all processes of `jax.distributed`; `devices` are those of the platform to be used."""

    def __init__(self, devices: Sequence[Any]) -> None:
        # One device of each process is enough: a host has one memory, and its bytes leave it once.
        first = {device.process_index: device for device in reversed(devices)}
        self.processes = tuple(sorted(first))
        self.process = jax.process_index()
        self._sharding = NamedSharding(
            JaxMesh(np.array([first[each] for each in self.processes]), (_AXIS,)), PartitionSpec(_AXIS)
        )
        self._compiled: dict[ByteLaunch, Callable[..., Any]] = {}

    def distance(self, sender: int, receiver: int) -> int:
        """How many processes further a message goes."""
        return (self.processes.index(receiver) - self.processes.index(sender)) % len(self.processes)

    def compile_launch(self, launch: ByteLaunch) -> Callable[..., Any]:
        """The program of a launch, compiled once."""
        if launch not in self._compiled:
            # Words of 4 bytes: some platforms pad arrays of single bytes to four times their size.
            count = len(self.processes)

            def exchange(state: jax.Array, *messages: jax.Array) -> tuple[jax.Array, ...]:
                states = lax.all_gather(state, _AXIS, tiled=True)
                pairs = [[(at, (at + far) % count) for at in range(count)] for far in launch.distances]
                moved = [lax.ppermute(each, _AXIS, pair) for each, pair in zip(messages, pairs, strict=True)]
                return states, *moved

            spec = self._sharding.spec
            each = (spec,) * len(launch.distances)
            of_all = jax.shard_map(
                exchange,
                mesh=self._sharding.mesh,
                in_specs=(spec, *each),
                out_specs=(PartitionSpec(), *each),
                check_vma=False,
            )
            given = [jax.ShapeDtypeStruct((count,), np.int32, sharding=self._sharding)]
            given += [
                jax.ShapeDtypeStruct((count * nbytes // 4,), np.uint32, sharding=self._sharding)
                for nbytes in launch.lengths
            ]
            with placement.without_mesh():
                self._compiled[launch] = jax.jit(of_all).lower(*given).compile()
        return self._compiled[launch]

    def run(
        self, launch: ByteLaunch, messages: Mapping[int, Array], state: int = 0
    ) -> tuple[dict[int, Array], dict[int, int]]:
        """Sends the message for each distance: those that arrive, by the distance they came, and the state that each
        process has given.

        A message is an array of the bytes that the launch says, which is read until this returns.
        """
        program = self.compile_launch(launch)
        told = self._place(np.array([state], np.int32))
        sent = [self._place(messages[far].view(np.uint32)) for far in launch.distances]
        with placement.without_mesh(), placement.without_transfer_guard():
            states, *arrived = program(told, *sent)
            every = np.asarray(states.addressable_data(0)).tolist()
            here = [np.asarray(each.addressable_data(0)).view(np.uint8) for each in arrived]
        return dict(zip(launch.distances, here, strict=True)), dict(zip(self.processes, every, strict=True))

    def _place(self, mine: Array) -> jax.Array:
        shape = (len(mine) * len(self.processes),)
        return jax.make_array_from_callback(shape, self._sharding, lambda _: mine)
