"""Plans of loads: each element read by one process, moved to where it is wanted, in waves within the budget."""

import itertools
import math
import random

import numpy as np
import pytest

import reshard as rs
from reshard.errors import BudgetError
from reshard.plans.load_plan import LoadPlan
from reshard.plans.stored import ChunkGrid, Stored
from reshard.synth.reading import ReadOptions, choose_as_read, plan_reading
from tests.synth.loads import clip, count_readers, draw_problem, expect, fill, run_load, store


def check_load(plan: LoadPlan, moves, sources, fills, stored) -> None:
    """Each element is read by one process, and all tiles are what views say."""
    for name, counts in count_readers(plan, stored).items():
        assert (counts == 1).all(), (name, counts.min(), counts.max())
    arrays = fill(stored)
    got, want = run_load(plan, arrays), expect(moves, sources, fills, arrays)
    assert set(got) == set(want)
    for name, tiles in want.items():
        layout = plan.targets[name]
        for device, tile in tiles.items():
            np.testing.assert_array_equal(clip(layout, device, got[name][device]), clip(layout, device, tile))


@pytest.mark.fast(2)
@pytest.mark.parametrize("start", range(0, 120, 30))
def test_random_loads(start):
    seen = dict.fromkeys(("pack", "slab", "split", "box", "waves"), 0)
    for seed in range(start, start + 30):
        problem = draw_problem(random.Random(seed))
        plan = plan_reading(*problem)
        check_load(plan, problem.moves, problem.sources, problem.fills, problem.stored)
        assert LoadPlan.from_json(plan.to_json()) == plan
        readings = [reading for wave in plan.waves for reading in wave.readings]
        seen["pack"] += any(each.packed for each in readings)
        seen["slab"] += any(each.box for each in readings)
        seen["split"] += any(each.split > 1 for each in readings)
        seen["box"] += any(each.box for wave in plan.waves for each in wave.direct)
        seen["waves"] += len(plan.waves) > 1
        if not any(isinstance(each.pieces, ChunkGrid) for each in problem.stored.values()):
            assert sum(plan.read_bytes.values()) == sum(each.nbytes for each in problem.stored.values())
    assert all(seen.values()), seen


def model(layers: int = 4, hidden: int = 256) -> dict[str, Stored]:
    """Tensors like a model's, one behind another in a file."""
    shapes = {"embed": (1024, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes |= {f"{layer}.q": (hidden, hidden), f"{layer}.down": (hidden, 512), f"{layer}.norm": (hidden,)}
    stored, at = {}, 0
    for name, shape in shapes.items():
        stored[name] = store(name, shape, at=at)
        at += 4 * math.prod(shape)
    return stored


def lay_out(stored, mesh, rows="tp"):
    """Columns of `down` and rows of the rest by an axis; norms are replicated."""
    specs = {name: [[]] if "norm" in name else [[], [rows]] if "down" in name else [[rows]] for name in stored}
    return {n: rs.Move(s.as_stored, rs.Layout.from_spec(mesh, s.shape, s.dtype, specs[n])) for n, s in stored.items()}


def test_received_is_that_of_the_best_order_of_axes():
    """Against all orders of axes by which rows may be cut, planned one by one."""
    mesh = rs.Mesh(a=2, b=2, c=2)
    stored = store("w", (512, 512))
    orders = [f"f32[{{{x}}}{{{y}}}{{{z}}}64, 512]" for x, y, z in itertools.permutations("abc")]
    for target in (
        "f32[{a}256, {b}256]",
        "f32[512, {c}{a}128]",
        "f32[{c}256, 512]",
        "f32[512, 512]",
        "f32[{b}{a}{c}64, 512]",
    ):
        goal = rs.Layout.parse(target, mesh)
        plan = plan_reading({"w": stored}, {"w": rs.Move(stored.as_stored, goal)}, {}, {}, None, ReadOptions(1024))
        best = min(rs.plan(rs.Layout.parse(order, mesh), goal).received_bytes for order in orders)
        assert plan.received_bytes <= 1.05 * best, target
        assert {*plan.read_bytes.values()} == {512 * 512 * 4 // 8}


def test_pieces_of_any_size_are_read_by_their_owners():
    """Long runs, straight into tiles; short ones by even shares that move, and coded chunks whole."""
    mesh, flat, chunk = rs.Mesh(x=4), store("w", (64, 256)), 4 * 4 * 256
    grid = Stored("w", "float32", (64, 256), ChunkGrid((64, 256), (4, 256), chunk), (4, 256))

    def read(stored: Stored, rows: str, size: int = 1024) -> tuple[LoadPlan, rs.Layout]:
        goal = rs.Layout.parse(f"f32[{{x}}{rows}, 256]", mesh)
        move = rs.Move(stored.as_stored, goal)
        plan = plan_reading({"w": stored}, {"w": move}, {}, {}, None, ReadOptions(size))
        check_load(plan, {"w": move}, {}, {}, {"w": stored})
        assert sum(plan.read_bytes.values()) == flat.nbytes
        return plan, goal

    for stored in (flat, grid):
        for rows in ("(12,40,0,12)", "(12@3,40@0,12@1)"):
            plan, goal = read(stored, rows)
            assert [each.layout.dims for each in plan.waves[0].readings] == [goal.dims]
            assert plan.received_bytes == 0 and plan.waves[0].direct
    alternating = f"({','.join(f'1@{row % 3}' for row in range(63))},1@3)"
    for plan, goal in (read(flat, alternating, 1 << 20), read(grid, "(13,39,0,12)")):
        assert [each.layout.ragged for each in plan.waves[0].readings] == [False]
        assert plan.received_bytes <= 1.1 * goal.tile_bytes


def test_small_tensors_take_one_launch():
    stored = {f"n{at}": store(f"n{at}", (64 + at,), at=4 * (64 * at + at * (at - 1) // 2)) for at in range(50)}
    mesh = rs.Mesh(x=8)
    goal = {name: rs.Layout.from_spec(mesh, each.shape, "float32", [[]]) for name, each in stored.items()}
    plan = plan_reading(
        stored, {n: rs.Move(s.as_stored, goal[n]) for n, s in stored.items()}, {}, {}, None, ReadOptions()
    )
    assert plan.launches == 1 and len(plan.waves) == 1
    # Neighbours in the file are one run, of which each reader has an even share.
    assert {*plan.reads.values()} == {1} and max(plan.read_bytes.values()) - min(plan.read_bytes.values()) <= 64


def test_tensors_with_shapes_of_their_own_share_launches():
    """Readers of a part, others for each tensor, send to few devices each, and to the same ones."""
    rng, mesh, stored, at = random.Random(5), rs.Mesh(rep=2, fsdp=16, tp=4), dict[str, Stored](), 0
    for number in range(40):
        stored[f"w{number}"] = store(f"w{number}", (rng.randrange(16, 99), 4 * rng.randrange(4, 25)), at=at)
        at += stored[f"w{number}"].nbytes
    goal = {n: rs.Layout.from_spec(mesh, s.shape, "float32", ["fsdp", "tp"]) for n, s in stored.items()}
    moves = {n: rs.Move(s.as_stored, goal[n]) for n, s in stored.items()}
    plan = plan_reading(stored, moves, {}, {}, None, ReadOptions(2048))
    check_load(plan, moves, {}, {}, stored)
    assert min(each.layout.mesh.size for each in plan.waves[0].readings) == 8
    assert len(plan.waves) == 1 and plan.launches <= 32


def test_reads_are_no_more_than_their_size_asks_for():
    stored = model()
    for read_size in (1024, 16 << 10, 1 << 20):
        plan = plan_reading(stored, lay_out(stored, rs.Mesh(rep=4, tp=4)), {}, {}, None, ReadOptions(read_size))
        assert sum(plan.reads.values()) <= sum(each.nbytes for each in stored.values()) // read_size + 16
        assert sum(plan.read_bytes.values()) == sum(each.nbytes for each in stored.values())


def test_chunks_are_read_whole_and_readers_have_as_many():
    """16 tensors of 3 coded chunks for 4 readers: other readers have none of each, and as much in the end."""
    mesh, stored = rs.Mesh(x=4), {}
    for at in range(16):
        stored[f"w{at}"] = Stored(f"w{at}", "float32", (96, 64), ChunkGrid((96, 64), (32, 64), 8192), (32, 64))
    moves = {n: rs.Move(s.as_stored, rs.Layout.parse("f32[96, {x}16]", mesh)) for n, s in stored.items()}
    plan = plan_reading(stored, moves, {}, {}, None, ReadOptions(1024))
    check_load(plan, moves, {}, {}, stored)
    for wave in plan.waves:
        for reading in wave.readings:
            layout = reading.layout
            assert all(layout.tile_shape_of(device)[0] % 32 == 0 for device in layout.mesh.devices)
    assert sum(plan.reads.values()) == 48 and max(plan.read_bytes.values()) <= 1.05 * 16 * 3 * 8192 / 4


def test_a_budget_makes_waves_smaller_and_says_the_smallest_that_works():
    stored = {name: store(name, (4096, 512), at=at << 23) for at, name in enumerate("abcd")}
    mesh = rs.Mesh(x=4)
    moves = {n: rs.Move(s.as_stored, rs.Layout.parse("f32[4096, {x}128]", mesh)) for n, s in stored.items()}
    free = plan_reading(stored, moves, {}, {}, None, ReadOptions())
    budget = free.result_bytes + (2 << 20)
    assert free.peak_bytes > budget
    plan = plan_reading(stored, moves, {}, {}, None, ReadOptions(budget=budget))
    assert plan.peak_bytes <= budget and len(plan.waves) > len(free.waves)
    assert plan.received_bytes == free.received_bytes
    with pytest.raises(BudgetError) as raised:
        plan_reading(stored, moves, {}, {}, None, ReadOptions(budget=free.result_bytes))
    least = plan_reading(stored, moves, {}, {}, None, ReadOptions(budget=raised.value.smallest))
    assert least.peak_bytes == raised.value.smallest


def test_a_budget_lowers_the_size_of_reads_too():
    stored = {name: store(name, (1024, 512), at=at << 21) for at, name in enumerate("abcdefgh")}
    mesh = rs.Mesh(tp=4)
    moves = {n: rs.Move(s.as_stored, rs.Layout.parse("f32[1024, 512]", mesh)) for n, s in stored.items()}
    results = 8 << 21
    # Two readers of a MiB each would stage whole tensors.
    plan = plan_reading(stored, moves, {}, {}, None, ReadOptions(1 << 20, budget=results + (1 << 20)))
    assert plan.peak_bytes <= results + (1 << 20)
    with pytest.raises(BudgetError, match="or less with a wave= below 256"):
        plan_reading(stored, moves, {}, {}, None, ReadOptions(1 << 20, budget=results))


def test_what_its_reader_wants_is_read_straight_into_the_result():
    stored = model()
    plan = plan_reading(stored, lay_out(stored, rs.Mesh(tp=4)), {}, {}, None, ReadOptions(1024))
    straight = {each.target for wave in plan.waves for each in wave.direct}
    assert straight == {name for name in stored if name.endswith("q") or name == "embed"}
    plan = plan_reading(stored, lay_out(stored, rs.Mesh(tp=4)), {}, {}, dict.fromkeys(range(4), 0), ReadOptions())
    assert {each.target for wave in plan.waves for each in wave.direct} == {*stored} and not plan.received_bytes


def test_the_devices_of_a_process_read_once_and_side_by_side():
    """Two processes of four devices: rows are cut between processes alone, columns are those of devices."""
    stored = store("w", (1024, 1024))
    processes = {device: device // 4 for device in range(8)}
    move = rs.Move(stored.as_stored, rs.Layout.parse("f32[1024, {tp}256]", rs.Mesh(rep=2, tp=4)))
    assert str(choose_as_read(stored, move, processes, ReadOptions())) == "f32[{rep}512, {tp}256]"
    assert str(choose_as_read(stored, move, None, ReadOptions(1024))) == "f32[{tp}{rep}128, 1024]"


def test_a_damaged_plan_in_json_is_refused():
    stored = model(1)
    text = plan_reading(stored, lay_out(stored, rs.Mesh(tp=4)), {}, {}, None, ReadOptions()).to_json()
    assert LoadPlan.from_json(text).to_json() == text
    for old, new in (
        ('"launches": ', '"launches": 1'),
        ('"box": null', '"box": [0, 3]'),
        ('"mesh": 0', '"mesh": 9'),
        ('"format": 1', '"format": 2'),
        ('"tree": {', '"tree": [{'),
    ):
        assert old in text
        with pytest.raises(rs.errors.ReshardError):
            LoadPlan.from_json(text.replace(old, new, 1))
