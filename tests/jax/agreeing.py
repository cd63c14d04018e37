"""What a process of several does that agree on moves, or do not.

`tests.jax.worker` runs these checks. One that fails raises, and the process ends with its traceback.
"""

from __future__ import annotations

import os
import random
import signal
import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import AgreementError
from reshard.jax import redistribute
from tests.jax.oracle import assert_exact, filled, mesh_of, specs
from tests.jax.worker import placed

SHAPES = [(8, 8), (16, 8), (8, 24)]


def ends(choose: random.Random) -> tuple[NamedSharding, NamedSharding]:
    """Two shardings on random devices of all processes, the same ones or others."""
    found: list[NamedSharding] = []
    for _ in range(2):
        sizes = choose.choice([{"x": 4, "y": 2}, {"x": 2, "y": 2}, {"x": 4}])
        order = choose.sample(range(8), int(np.prod(list(sizes.values()))))
        mesh = mesh_of(sizes, order=order)
        found.append(NamedSharding(mesh, choose.choice(list(specs(sizes, 2)))))
    if choose.random() < 0.5:
        found[1] = NamedSharding(found[0].mesh, choose.choice(list(specs(dict(found[0].mesh.shape), 2))))
    return found[0], found[1]


def moves() -> None:
    """Random moves, the same on all processes, some again: every tile is right."""
    choose = random.Random(0)
    listed = [(*ends(choose), choose.choice(SHAPES)) for _ in range(5)]
    for source, target, shape in [choose.choice(listed) for _ in range(int(os.environ.get("MOVES", "10")))]:
        values = filled(shape)
        y = redistribute(placed(source, values), target)
        if y.addressable_shards:
            assert_exact(y, target, values)


def mismatches() -> None:
    """One process asks for another target, on one mesh or on other devices: all raise, and the next move works."""
    choose = random.Random(1)
    for turn in range(2):
        mesh = mesh_of({"x": 4, "y": 2})
        source = NamedSharding(mesh, P("x", "y"))
        right = NamedSharding(mesh, P("y", "x"))
        wrong = [NamedSharding(mesh, P(None, ("y", "x"))), NamedSharding(mesh_of({"t": 4}, order=[2, 4, 6, 7]), P("t"))]
        shape = (8 * (turn + 1), 16)  # A new move each time.
        values = filled(shape)
        x = placed(source, values)
        odd, other = choose.randrange(jax.process_count()), choose.choice(wrong)
        try:
            redistribute(x, other if jax.process_index() == odd else right)
        except AgreementError as error:
            assert "asks for float32" in str(error) and "nothing was moved" in str(error), error
        else:
            raise AssertionError(
                f"process {jax.process_index()} of turn {turn} did not see that {odd} asked for {other}"
            )
        assert_exact(redistribute(x, right), right, values)
    # Each asks for something of its own.
    own = [P("y", "x"), P(None, ("y", "x")), P("y"), P()][jax.process_index() % 4]
    x, began = placed(source, filled((64, 16))), time.monotonic()
    try:
        redistribute(x, NamedSharding(mesh, own))
    except AgreementError as error:
        assert "nothing was moved" in str(error) and time.monotonic() - began < 100, error
    else:
        raise AssertionError(f"process {jax.process_index()} went on")
    assert_exact(redistribute(x, right), right, filled((64, 16)))


def outside() -> None:
    """Moves among the devices of some processes, of which the others know nothing."""
    first = [device.id for device in jax.devices() if device.process_index == 0]
    mesh = mesh_of({"t": len(first)}, order=[jax.devices().index(d) for d in jax.devices() if d.id in first])
    source, target, values = NamedSharding(mesh, P("t")), NamedSharding(mesh, P(None, "t")), filled((8, 8))
    if jax.process_index() == 0:
        assert_exact(redistribute(placed(source, values), target), target, values)


def killed() -> None:
    """The last process dies between two moves: the others say so, within the limit that the environment gives."""
    mesh = mesh_of({"x": 4, "y": 2})
    source, values = NamedSharding(mesh, P("x")), filled((8, 8))
    x = placed(source, values)
    redistribute(x, NamedSharding(mesh, P("y"))).block_until_ready()
    if jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        redistribute(x, NamedSharding(mesh, P(None, "x")))
    except AgreementError as error:
        assert "has not asked" in str(error) and time.monotonic() - began < 6, error
    else:
        raise AssertionError("nobody noticed")
    print("noticed", flush=True)
    os._exit(0)  # The service of jax.distributed would wait for the dead one.
