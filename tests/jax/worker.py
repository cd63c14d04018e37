"""Checks that need processes of their own: for many devices, or for several processes.

    python -m tests.jax.worker many
    python -m tests.jax.worker one_of_several,agreeing.moves,loads.processes=<folder> <number> <count> <port>

Checks are functions here or of another module of this folder. Processes are started for many of them at once, since
that takes longer than most of them do. A check that fails raises, and the process ends with its traceback.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import AgreementError, BudgetError
from reshard.jax import Part, Target, compiled_forms, redistribute, reshard_pytree
from tests.jax.oracle import assert_exact, filled, mesh_of, specs

ROOT = Path(__file__).parents[2]
SECONDS = 600
"""A process that takes longer is killed, and the test fails."""


# ---- starting processes ----------------------------------------------------------------------------


def start(arguments: Sequence[str], devices: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.jax.worker", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def check(arguments: Sequence[str], devices: int, processes: int = 1, killed: int | None = None) -> None:
    """Runs checks in several processes, each with a number of devices, and asserts that all succeed in time.

    The process with the number `killed` must end by SIGKILL.
    """
    with _kept_port() as port:
        numbered = [[*arguments, str(number), str(processes), str(port)] for number in range(processes)]
        started = [start(given if processes > 1 else arguments, devices) for given in numbered]
        end = time.monotonic() + SECONDS
        try:
            outputs = [process.communicate(timeout=max(1, end - time.monotonic()))[0] for process in started]
        finally:
            for process in started:
                process.kill()
    for number, (process, output) in enumerate(zip(started, outputs, strict=True)):
        assert process.returncode == (-signal.SIGKILL if number == killed else 0), output


@contextmanager
def _kept_port() -> Iterator[int]:
    """A free port that other programs do not get meanwhile; the processes may bind it beside this socket."""
    with socket.socket() as kept:
        if hasattr(socket, "SO_REUSEPORT"):
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("", 0))
        yield kept.getsockname()[1]


# ---- what a process does ---------------------------------------------------------------------------


def many() -> None:
    """Sampled pairs on 8 x 10 = 80 devices, eagerly and in one program."""
    sizes, values = {"x": 8, "y": 10}, filled((80, 80))
    assert len(jax.devices()) == 80
    mesh = mesh_of(sizes)
    every = [NamedSharding(mesh, spec) for spec in specs(sizes, 2)]
    choose = random.Random(0)
    for source, target in (choose.sample(every, 2) for _ in range(4)):
        assert_exact(redistribute(jax.device_put(values, source), target), target, values)
    source = NamedSharding(mesh, P("x", "y"))
    targets = [NamedSharding(mesh, P(*spec)) for spec in (["y", "x"], [None, ("y", "x")], ["x"])]
    moved = jax.jit(lambda x: [redistribute(x, t, source=source) for t in targets])(jax.device_put(values, source))
    for y, target in zip(moved, targets, strict=True):
        assert_exact(y, target, values)


def crowd() -> None:
    """Hundreds of moves that nobody waits for."""
    mesh = mesh_of({"x": 4, "y": 2})
    source, target = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("y", "x"))
    arrays = [jax.device_put(filled((64, 64)) + number, source) for number in range(500)]
    for x in arrays:
        redistribute(x, target)
    moved = [redistribute(x, target) for x in arrays]
    moved += redistribute(arrays, target)
    sizes = [jax.device_put(filled((8, 8 * (1 + number % 40))), source) for number in range(400)]
    moved += redistribute(sizes, target)
    for y, x in zip(moved, [*arrays, *arrays, *sizes], strict=True):
        assert y.sharding == target and np.array_equal(np.asarray(y), np.asarray(x))


def one_of_several() -> None:
    """Each process checks its own shards."""
    assert (jax.process_count(), len(jax.local_devices())) == (2, 4)
    orders = [list(range(8)), [0, 4, 1, 5, 2, 6, 3, 7], [6, 1, 4, 3, 0, 7, 2, 5]]
    for order in orders:
        within_one_mesh(order)
    for one, other in ((0, 1), (1, 2)):
        across(orders[one], orders[other])
    unequal_processes()
    not_sharded_yet(orders[2])
    donated(orders[1])
    within_budgets(orders[1])


def within_budgets(order: list[int]) -> None:
    """Each process compiles the forms, and they agree on what they found: here one has a compiler that counts more."""
    number, mesh, values = jax.process_index(), mesh_of({"x": 4, "y": 2}, order=order), filled((256, 512))
    rows, columns = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P(None, ("x", "y")))
    x = placed(rows, values)
    try:
        redistribute(x, columns, budget=1000)
    except BudgetError as error:
        smallest = error.smallest
    for options in ({"budget": smallest}, {"prefer": "measured"}):
        assert_exact(redistribute(x, columns, **options), columns, values)
    known = compiled_forms.read_memory
    compiled_forms.read_memory = lambda *given: (2 * number * known(*given)[0] + known(*given)[0], known(*given)[1])
    compiled_forms.compile_form.cache_clear()
    try:
        redistribute(x, columns, budget="190KiB")
    except AgreementError as error:
        assert "budget 194560 B is too small" in str(error) and "process 0" in str(error), error
    else:
        raise AssertionError("one process moves what another refuses")
    finally:
        compiled_forms.read_memory = known
        compiled_forms.compile_form.cache_clear()
    assert_exact(redistribute(x, columns, budget="200KiB"), columns, values)


def disagree() -> None:
    """One process has other names, versions, shapes or targets: both raise the same, nothing moves, the next works."""
    mesh = mesh_of({"x": 4, "y": 2})
    rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
    values = filled((8, 8))
    tree = {name: placed(rows, values) for name in ("a", "b")}
    odd = jax.process_index() == 1
    parts = [Part(name, view="r c -> (n r) c", into={"n": at}, n=2) for at, name in enumerate("ab")]
    faults: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "'b' only on process 0": ({"a": tree["a"], "c": tree["b"]}, columns, {}),
        "has version 1 on process 0 and 2": (tree, columns, {"version": 2}),
        "'b' has layout": (tree, {"a": columns, "b": rows}, {}),
        "'a' has shape": ({"a": placed(rows, filled((16, 8))), "b": tree["b"]}, columns, {}),
        "'a' has dtype": ({"a": placed(rows, values.astype("int32")), "b": tree["b"]}, columns, {}),
        "budget None": (tree, columns, {"budget": 1 << 20}),
        "process 1: PlanError": (tree, columns, {"budget": "much"}),
        "process 1: LayoutError": (tree, {"a": columns, "b": 7}, {}),
        "'a, of b' only on process 1": (tree, {"a": Target(columns, source="b"), "b": columns}, {}),
        "'c, part 0, of a', 'c, part 1, of b' only on process 1": (tree, {"c": Target(columns, parts=parts)}, {}),
    }
    for text, (source, target, options) in faults.items():
        given = (source, target, {"version": 1} | options) if odd else (tree, columns, {"version": 1})
        try:
            reshard_pytree(given[0], given[1], **given[2])
        except AgreementError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    moved = reshard_pytree(tree, columns, version=1)
    for name in tree:
        assert_exact(moved[name], columns, values)
        assert_exact(tree[name], rows, values)


def to_others() -> None:
    """Moves to devices of other processes: each process checks its own shards, and some have none of one end.

    Of four processes, each compiles the same programs, so that they make a sample.
    """
    assert len(jax.devices()) == 8
    first, last = mesh_of({"a": 2, "b": 2}), mesh_of({"t": 4}, order=[4, 5, 6, 7])
    every = mesh_of({"a": 4, "b": 2}, order=[0, 4, 1, 5, 2, 6, 3, 7])
    mixed, alone = mesh_of({"t": 2, "u": 3}, order=[0, 7, 5, 1, 4, 3]), mesh_of({"t": 1}, order=[5])
    values = filled((24, 12))
    moves = [
        (first, P("a", "b"), last, P("t")),
        (first, P("a"), last, P()),
        (last, P("t"), first, P("b", "a")),
        (first, P(("a", "b")), last, P("t")),
        (first, P("a", "b"), every, P("b", "a")),
        (every, P("a", "b"), mixed, P("u", "t")),
        (mixed, P("t", "u"), last, P(None, "t")),
        (last, P("t"), alone, P()),
        (mesh_of({"t": 1}, order=[0]), P(), mesh_of({"d": 5}, order=[0, 1, 4, 5, 6]), P()),  # a relay
    ]
    few = jax.process_count() > 2
    for turn, (one, before, other, after) in enumerate(moves[:: 4 if few else 2]):
        target, donate = NamedSharding(other, after), turn % 2 == 0
        x = placed(NamedSharding(one, before), values)
        y = redistribute(x, target, donate=donate)
        assert y.sharding == target and x.is_deleted() == donate
        if target.addressable_devices:
            assert_exact(y, target, values)
        else:
            assert (y.shape, y.dtype, y.addressable_shards) == (values.shape, values.dtype, [])
    y = redistribute(placed(NamedSharding(first, P("a", "b")), values), NamedSharding(last, P("t")), budget=2000)
    if y.addressable_shards:
        assert_exact(y, y.sharding, values)
    if few:
        parts_to_others(NamedSharding(every, P("a")), NamedSharding(mixed, P("t")), values, [(None, redistribute)])
        return
    views_to_others(NamedSharding(first, P("a", "b")), NamedSharding(last, P("t")), values)
    ways = (None, redistribute), ("1MiB", redistribute), (None, reshard_pytree)
    for ends, way in zip(((every, mixed), (first, last), (last, first)), ways, strict=True):
        parts_to_others(*(NamedSharding(mesh, P(mesh.axis_names[0])) for mesh in ends), values, [way])


def parts_to_others(source: NamedSharding, target: NamedSharding, values: np.ndarray, ways: Sequence[Any]) -> None:
    """Arrays that fill one, in and out of a budget, and one that is taken apart, tied under two names."""
    rows = [{0: slice(24 * at, 24 * at + 24)} for at in range(3)]
    parts = [Part(str(at), into=into) for at, into in enumerate(rows)]
    fused = np.concatenate([values + at for at in range(3)])
    for budget, move in ways:
        tree = [placed(source, values + at) for at in range(3)]
        (y,) = move(tree, [Target(target, shape=(72, 12), parts=parts)], budget=budget, donate=True)
        assert all(x.is_deleted() for x in tree)
        if y.addressable_shards:
            assert_exact(y, target, fused)
        split = {str(at): Target(source, source="w", take=take) for at, take in enumerate(rows)}
        moved = move({"w": y}, split | {"tied": Target(source, source="w"), "again": Target(source, source="w")})
        assert moved["tied"] is moved["again"]
        for name, right in [("tied", fused), *((str(at), values + at) for at in range(3))]:
            if moved[name].addressable_shards:
                assert_exact(moved[name], source, right)


def views_to_others(source: NamedSharding, target: NamedSharding, values: np.ndarray) -> None:
    """A transposition, a dim across atoms, a part that is filled, a cast with a scale."""
    x, scale = placed(source, values), np.arange(1, 25, dtype="float32").reshape(24, 1)
    old = np.full((24, 24), 0.5, "float32")
    old[:, 6:18] = values
    out = placed(target, np.full((24, 24), 0.5, "float32"))
    wanted = [
        (redistribute(x, target, view="(t h) d -> d (h t)", t=3), values.reshape(3, 8, 12).transpose(2, 1, 0)),
        (redistribute(x, target, view="(h t) d -> h t d", t=2), values),
        (redistribute(x, target, into={1: slice(6, 18)}, out=out), old),
        (redistribute(x, target, dtype="bfloat16", scale=scale), (values / scale).astype(jax.numpy.bfloat16)),
    ]
    tree = redistribute({"a": x, "b": x}, target, budget=4000, donate=True)
    assert x.is_deleted()
    for y, right in [*wanted, (tree["a"], values), (tree["b"], values)]:
        if y.addressable_shards:
            assert_exact(y, target, right.reshape(y.shape))


def placed(sharding: NamedSharding, values: np.ndarray) -> jax.Array:
    """The array of these values; a process without devices of the sharding has none of its shards."""
    shards = [
        jax.device_put(values[index], device)
        for device, index in sharding.addressable_devices_indices_map(values.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, shards, dtype=values.dtype)


SIZES, VALUES = {"x": 4, "y": 2}, filled((8, 8))


def within_one_mesh(order: list[int]) -> None:
    """Eagerly, and jitted with and without `source=`; in some orders the devices of both processes alternate."""
    mesh = mesh_of(SIZES, order=order)
    every = [NamedSharding(mesh, spec) for spec in specs(SIZES, 2)]
    choose = random.Random(str(order))
    source, target = choose.sample(every, 2)
    assert_exact(redistribute(placed(source, VALUES), target), target, VALUES)
    for given in (source, None):
        f = jax.jit(lambda x, s=given: redistribute(x, target, source=s))
        assert_exact(f(placed(source, VALUES)), target, VALUES)


def across(one: list[int], other: list[int]) -> None:
    for before, after in ((P("x", "y"), P(None, ("y", "x"))), (P("x"), P("y")), (P(), P("x"))):
        source = NamedSharding(mesh_of(SIZES, order=one), before)
        target = NamedSharding(mesh_of(SIZES, order=other), after)
        assert_exact(redistribute(placed(source, VALUES), target), target, VALUES)


def unequal_processes() -> None:
    """Six devices: four of one process and two of the other."""
    mesh = mesh_of({"x": 2, "y": 3}, order=[0, 4, 1, 2, 5, 3])
    values = filled((6, 12))
    for before, after in ((P("x", "y"), P("y", "x")), (P("y"), P(None, ("x", "y"))), (P(("y", "x")), P(None, "y"))):
        source, target = NamedSharding(mesh, before), NamedSharding(mesh, after)
        assert_exact(redistribute(placed(source, values), target), target, values)


def not_sharded_yet(order: list[int]) -> None:
    target = NamedSharding(mesh_of(SIZES, order=order), P("x", "y"))
    assert_exact(redistribute(VALUES, target), target, VALUES)


def donated(order: list[int]) -> None:
    mesh = mesh_of(SIZES, order=order)
    x, target = placed(NamedSharding(mesh, P("y")), VALUES), NamedSharding(mesh, P("x", "y"))
    assert_exact(redistribute(x, target, donate=True), target, VALUES)
    assert x.is_deleted()


if __name__ == "__main__":
    names, *place = sys.argv[1:]
    if place:
        jax.distributed.initialize(
            f"localhost:{place[2]}", int(place[1]), int(place[0]), initialization_timeout=SECONDS
        )
    for name in names.split(","):
        given, _, folder = name.partition("=")
        module, _, function = given.rpartition(".")
        getattr(import_module(f"tests.jax.{module or 'worker'}"), function)(*([Path(folder)] if folder else []))
