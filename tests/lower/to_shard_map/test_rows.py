"""Exchanges between pieces of any size inside `jax.shard_map`, against tables of owners in numpy: block by block, by
tables of rows, and as one ragged all-to-all.

XLA:CPU has no ragged all-to-all, so an emulator of it, written from its documentation, takes its place there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.program import Exchange, Program, lower_batch
from reshard.lower.to_shard_map import batch_function, run_exchange, run_rows
from reshard.lower.to_shard_map.run_rows import find_rows
from reshard.plans.plan import Batch, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from tests.lower.to_shard_map.on_xla import stacked
from tests.owners import PADDING, Owned, assert_moved

MESHES = [{"x": 8}, {"x": 4, "y": 2}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}]
SHAPES = [(7,), (24,), (5, 4), (13, 1), (10, 6), (3, 2, 4)]
WRONG = -99
FORMS = ("boxes", "tables", "slices")


def emulate_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: Sequence[str],
) -> jax.Array:
    """What `jax.lax.ragged_all_to_all` is documented to do; `WRONG` where sender and receiver expect other sizes."""
    me, peers = lax.axis_index(axis_name), lax.axis_size(axis_name)
    each = len(send_sizes) // peers
    given = (operand, input_offsets, send_sizes, output_offsets)
    operands, starts, sent, ends = (lax.all_gather(one, axis_name) for one in given)
    place = jnp.arange(len(output))
    for at in range(peers * each):
        peer, mine = at // each, me * each + at % each
        begin, count = ends[peer][mine], recv_sizes[at]
        rows = operands[peer][jnp.clip(place - begin + starts[peer][mine], 0, len(operand) - 1)]
        rows = jnp.where(sent[peer][mine] == count, rows, jnp.full_like(rows, WRONG))
        inside = (place >= begin) & (place < begin + count)
        output = jnp.where(inside.reshape(-1, *[1] * (output.ndim - 1)), rows, output)
    return output


def in_form(program: Program, form: str, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program, whose exchanges run in this form on CPUs."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulate_ragged_all_to_all)
    monkeypatch.setattr(run_rows, "make_unfilled", lambda shape, dtype: jnp.full(shape, WRONG, dtype))
    for fewest in ("FEW", "MANY"):
        monkeypatch.setattr(run_exchange, fewest, -1 if form == "tables" else 1 << 30)
    on = ("cpu",) if form == "slices" else ()
    steps = (replace(each, sliced_on=on) if isinstance(each, Exchange) else each for each in program.instructions)
    return replace(program, instructions=tuple(steps))


def check_form(source: Owned, target: Owned, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device has its elements, and zeros beyond them in pieces, whatever is beyond those of the source."""
    plan = rs.plan(source.layout, target.layout)
    whole = np.arange(1, 1 + np.prod(source.layout.shape), dtype=np.int32).reshape(source.layout.shape)
    program = in_form(lower_plan(plan), form, monkeypatch)
    f, sharding = stacked(program, source.layout.mesh.axes)
    tiles, devices = source.tiles(whole), source.layout.mesh.devices
    moved = np.asarray(f(jax.device_put(np.stack([tiles[device] for device in devices]), sharding)))
    result = dict(zip(devices, moved, strict=True))
    assert_moved(target, whole, result)
    if target.layout.ragged and isinstance(program.instructions[-1], Exchange):  # Numerals move padding as it is.
        for device, wanted in target.tiles(whole).items():
            assert not result[device][wanted == PADDING].any(), f"padding of device {device} of {target.layout}"


def check_random_moves(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    for number in range(count):
        mesh, shape = rs.Mesh(choose.choice(MESHES)), choose.choice(SHAPES)
        source, target = (Owned.random(choose, mesh, shape) for _ in range(2))
        check_form(source, target, FORMS[number % len(FORMS)], monkeypatch)


def by_owner(mesh: rs.Mesh, owners: np.ndarray, columns: int) -> Owned:
    layout = rs.Layout.from_owners(owners, mesh, (len(owners), columns), "s32")
    return Owned(layout, [list(mesh.axes), []], [owners, np.zeros(columns, int)])


def test_random_moves(monkeypatch: pytest.MonkeyPatch):
    check_random_moves(714, 6, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(711, 713))
def test_more_random_moves(seed: int, monkeypatch: pytest.MonkeyPatch):
    check_random_moves(seed, 9, monkeypatch)


@pytest.mark.parametrize("form", FORMS)
def test_intervals_with_empty_ones(form: str, monkeypatch: pytest.MonkeyPatch):
    sizes = [[3, 3, 3, 3, 3, 3, 3, 3], [5, 0, 2, 1, 0, 7, 1, 8]]
    source, target = (by_owner(rs.Mesh(x=8), np.repeat(np.arange(8), each), 2) for each in sizes)
    check_form(source, target, form, monkeypatch)


@pytest.mark.parametrize("looped", [False, True])
def test_thousands_of_runs_are_few_kernels(looped: bool, monkeypatch: pytest.MonkeyPatch):
    """A table by owner at random would be thousands of copies; as tables it is a gather and a scatter a round."""
    mesh, draw = rs.Mesh(x=8), np.random.default_rng(7)
    source, target = (by_owner(mesh, draw.integers(0, 8, 3000), 3) for _ in range(2))
    monkeypatch.setattr(run_rows, "LOOPED_ROUNDS", 2 if looped else 16)
    plan = rs.plan(source.layout, target.layout)
    whole = np.arange(1, 9001, dtype=np.int32).reshape(3000, 3)
    f, sharding = stacked(lower_plan(plan), mesh.axes)
    given = jax.device_put(np.stack([*source.tiles(whole).values()]), sharding)
    assert str(jax.make_jaxpr(f)(given)).count(" = scatter[") == (2 if looped else 8)
    assert_moved(target, whole, dict(enumerate(np.asarray(f(given)))))


@pytest.mark.parametrize("looped", [False, True])
def test_relays_by_tables(looped: bool, monkeypatch: pytest.MonkeyPatch):
    """What is passed on is read from the result, once the first turn has written it."""
    mesh, draw = rs.Mesh(x=4, y=2), np.random.default_rng(9)
    owners = [draw.integers(0, 4, 60) for _ in range(2)]
    layouts = [rs.Layout.from_owners(each, mesh, (60, 2), "s32", axes=["x"]) for each in owners]
    source, target = (
        Owned(layout, [["x"], []], [each, np.zeros(2, int)]) for layout, each in zip(layouts, owners, strict=True)
    )
    monkeypatch.setattr(run_exchange, "MANY", -1)
    monkeypatch.setattr(run_rows, "LOOPED_ROUNDS", 2 if looped else 16)
    plan = chain(*layouts, [StepSpec("exchange", layouts[1], StepMode(relay=True))])
    whole = np.arange(1, 121, dtype=np.int32).reshape(60, 2)
    f, sharding = stacked(lower_plan(plan), mesh.axes)
    given = jax.device_put(np.stack([*source.tiles(whole).values()]), sharding)
    assert_moved(target, whole, dict(enumerate(np.asarray(f(given)))))


@pytest.mark.parametrize("form", FORMS)
def test_several_arrays_at_once(form: str, monkeypatch: pytest.MonkeyPatch):
    mesh = rs.Mesh(x=4)
    draw = np.random.default_rng(8)
    source, target = (by_owner(mesh, draw.integers(0, 4, 9), 3) for _ in range(2))
    batch = Batch(("a", "b"), (rs.plan(source.layout, target.layout),) * 2)
    programs = [in_form(program, form, monkeypatch) for program in lower_batch(batch)]
    wholes = [np.arange(first, first + 27, dtype=np.int32).reshape(9, 3) for first in (1, 100)]
    spec = jax.sharding.PartitionSpec("x")
    run = batch_function(programs, mesh.axes)
    f = jax.shard_map(
        lambda a, b: tuple(each[None] for each in run(a[0], b[0])),
        mesh=jax.sharding.Mesh(jax.devices()[:4], ("x",)),
        in_specs=(spec, spec),
        out_specs=(spec, spec),
        check_vma=False,
    )
    given = [np.stack([*source.tiles(whole).values()]) for whole in wholes]
    for whole, moved in zip(wholes, jax.jit(f)(*given), strict=True):
        assert_moved(target, whole, dict(enumerate(np.asarray(moved))))


def test_rows_are_as_wide_as_they_can_be():
    mesh = rs.Mesh(x=2)
    ends = [rs.Layout.parse(text, mesh) for text in ("f32[{x}6, 8]", "f32[{x}(4,8), 8]")]
    (step,) = lower_plan(rs.plan(*ends)).instructions
    assert isinstance(step, Exchange)
    moves = find_rows(step)
    assert moves is not None and moves.width == 16  # Two rows of 8: sizes and places are even numbers.
    assert {link: runs.tolist() for link, runs in moves.runs.items()} == {
        (0, 0, False): [[0, 0, 2]],
        (0, 1, False): [[2, 0, 1]],
        (1, 1, False): [[0, 1, 3]],
    }
