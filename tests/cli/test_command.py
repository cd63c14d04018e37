"""The `reshard` command: its output, its exit codes, the examples in its help, and its errors."""

import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import reshard as rs
from reshard.cli import main, simulate, trial
from reshard.cli.arguments import parser
from reshard.show import explain
from reshard.show.holders import fixed, label, owners, pieces, ranges
from reshard.types.meaning import meaning
from reshard.types.units import parse_bytes, parse_shape
from tests.layouts import random_layout

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TARGET = "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"
MESH = ("--mesh", "x=4,y=2")
COMMANDS = ("plan", "show", "simulate", "prove")


class Ran:
    """What a call did."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(capsys, monkeypatch):
    """Calls the command in this process, 100 columns wide unless told otherwise."""

    def called(*argv: str, columns: int = 100) -> Ran:
        monkeypatch.setenv("COLUMNS", str(columns))
        try:
            code = main(argv)
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return called


# ---- plan ------------------------------------------------------------------------------------------

GOLDEN = """\
f32[{y}8, 16, {x}4]
-> f32[16, {x}{y}2, 16]
   16.0 KiB on 8 devices, mesh <x=4, y=2>

      step         type after it          received     live
  ─────────────────────────────────────────────────────────
  1   all_to_all   f32[16, {x}{y}2, 16]     1792 B   6144 B

  received  1792 B on the worst device, the lower bound
  launches  1
  peak      6144 B live on a device: operand 2048 B + result 2048 B + scratch 2048 B; floor 4096 B
"""


def test_plan_prints_a_table(call):
    ran = call("plan", *MESH, SOURCE, TARGET)
    assert (ran.code, ran.out, ran.err) == (0, GOLDEN, "")


def test_plan_json_is_one_object_that_reads_back(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", "tpu-v5p", "--json")
    data = json.loads(ran.out)
    totals = {"source", "target", "steps", "received_bytes", "lower_bound_bytes", "launches", "peak_bytes", "seconds"}
    assert totals <= data.keys()
    for step in data["steps"]:
        assert {"kind", "operand", "result", "received_bytes", "live_bytes"} <= step.keys()
    assert (data["source"], data["target"]) == (SOURCE, TARGET)
    assert data["received_bytes"] >= data["lower_bound_bytes"] == 1792
    assert rs.Plan.from_json(ran.out).seconds == data["seconds"] > 0


def test_plan_for_a_network_shows_seconds(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", "h100")
    assert "seconds" in ran.out
    assert re.search(r"predicted +[0-9.]+ us on h100", ran.out)


def test_plan_reads_a_network_file(call, tmp_path):
    path = tmp_path / "lab.json"
    path.write_text(rs.Network.uniform(1e-3, 1e9).to_json(), encoding="utf-8")
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", str(path), "--json")
    assert 1e-3 < json.loads(ran.out)["seconds"] < 1e-2


def test_plan_with_nothing_to_do(call):
    ran = call("plan", *MESH, SOURCE, SOURCE, "--explain")
    assert "nothing to do" in ran.out
    assert "no step is needed" in ran.out


@pytest.mark.parametrize(
    "size", ["4096", "4KiB", "4 KiB", "4.096kB", "0.00390625MiB", "4_096", "0.000003814697265625 GiB"]
)
def test_a_budget_is_met_however_it_is_written(call, size):
    ran = call("plan", *MESH, SOURCE, TARGET, "--budget", size, "--json")
    assert json.loads(ran.out)["peak_bytes"] == 4096


def test_donate_is_passed_on(call):
    assert json.loads(call("plan", *MESH, SOURCE, TARGET, "--donate", "--json").out)["donate"] is True


EXPLAINED = [
    (SOURCE, TARGET, "dim 0 is no longer split over y and dim 2 is no longer split over x"),
    (SOURCE, TARGET, "in its place, dim 1 becomes split over x and y"),
    ("f32[16]", "f32[{x}4]", "no dim was split over x before"),
    ("f32[16]", "f32[{x}4]", "receives nothing"),
    ("f32[{x}4]", "f32[16]", "each device collects the 4 tiles along x"),
    ("f32[{x}{y}2]", "f32[{y}{x}2]", "dim 0 passes from x then y to y then x"),
    ("f32[{x}4, 16]", "f32[{y}8, {x}4]", "no single collective does that"),
    ("f32[{x}3/10]", "f32[{y}5]", "dim 0 (pieces of 3 before, pieces of 5 after) are uneven"),
    ("f32[8, 16] + sum{x}", "f32[{x}2, 16]", "combine it piece by piece"),
    ("f32[3] + max{x}", "f32[3]", "the array is still the max of what the devices along x hold"),
    (SOURCE, TARGET, "no device receives more"),
    (SOURCE, TARGET, "Every --budget from 4096 B up can be met; the smallest takes 112 launches (exchange)"),
]


@pytest.mark.parametrize(("source", "target", "said"), EXPLAINED, ids=[said for *_, said in EXPLAINED])
def test_explain_says_why(call, source, target, said):
    ran = call("plan", *MESH, source, target, "--explain")
    assert ran.code == 0
    assert said in " ".join(ran.out.split())


def test_explain_says_what_a_budget_does(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--explain", "--budget", "4096")
    words = " ".join(ran.out.split())
    assert "does not fit the budget" in words
    assert "messages of at most" in words


def test_explain_says_what_a_network_costs_in_bytes(call):
    request = ("plan", "--mesh", "dcn=2,x=4", "f32[{x}4,16]", "f32[{dcn}8,{x}4]", "--explain", "--network", "tpu-v5p")
    words = " ".join(call(*request).out.split())
    assert "Without --network the plan would receive" in words
    assert "are predicted on tpu-v5p" in words


def test_explain_speaks_of_every_step_of_random_plans():
    chance = random.Random(1)
    kinds = set()
    for mesh, networks in ((rs.Mesh(x=4, y=2), (None, "h100")), (rs.Mesh(a=2, b=3, c=2), (None,))):
        for _ in range(150):
            source, target = (random_layout(chance, mesh, (12, 24)) for _ in range(2))
            for network in networks:
                plan = rs.plan(source, target, network=network)
                for step in plan.steps:
                    kinds.add(step.kind)
                    assert len(explain.why(step)) > 40
    assert kinds >= {"slice", "all_gather", "all_to_all", "permute", "exchange"}


# ---- every notation --------------------------------------------------------------------------------

ARRAY = ("--shape", "16,16,16", "--dtype", "f32")
WRITTEN = [
    (SOURCE, TARGET, MESH),
    (SOURCE, "P(None, ('x', 'y'))", MESH),
    ("P('y', None, 'x')", TARGET, MESH),
    ("P('y', None, 'x')", "PartitionSpec(None, ('x', 'y'), None)", (*MESH, *ARRAY)),
    ('[{"y"}, {}, {"x"}]', '[{}, {"x", "y"}, {}]', (*MESH, *ARRAY)),
    ('[{"y"}, {}, {"x"}]', TARGET, MESH),
    ('<mesh<["x"=4, "y"=2]>, [{"y"}, {}, {"x"}]>', '[{}, {"x", "y"}, {}]', ARRAY),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}", ARRAY),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", TARGET, MESH),
    (SOURCE, "{devices=[1,8,1]<=[8]}", MESH),
    (SOURCE, "{devices=[1,8,1]<=[8]}", (*MESH, *ARRAY)),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", "P(None, ('d0', 'd1'))", ARRAY),
    ("P('d1', None, 'd0')", "{devices=[1,8,1]0,1,2,3,4,5,6,7}", ("--mesh", "d0=4,d1=2", *ARRAY)),
    (SOURCE, "f32[16, {z}2, 16]", (*MESH, "--target-mesh", "z=8")),
]


@pytest.mark.parametrize(("source", "target", "given"), WRITTEN)
def test_every_notation_means_the_same(call, source, target, given):
    ran = call("plan", source, target, *given, "--json")
    assert ran.err == ""
    data = json.loads(ran.out)
    assert [step["kind"] for step in data["steps"]] == ["all_to_all"]
    assert data["received_bytes"] == 1792


@pytest.mark.parametrize("pair", list(itertools.permutations(["{replicated}", "{devices=[8,1,1]<=[8]}"])))
def test_hlo_replicated_is_over_the_devices_of_the_other(call, pair):
    ran = call("plan", *pair, *ARRAY, "--json")
    kinds = [step["kind"] for step in json.loads(ran.out)["steps"]]
    assert kinds == (["slice"] if pair[0] == "{replicated}" else ["all_gather"])


def test_a_mesh_of_the_target_serves_the_source(call):
    ran = call("plan", "P('d1')", "{devices=[1,8,1]<=[4,2]T(1,0)}", *ARRAY, "--json")
    assert ran.code == 0, ran.err


# ---- show ------------------------------------------------------------------------------------------


def test_show_draws_a_grid(call):
    ran = call("show", *MESH, "f32[{x}4, {y}8]")
    assert ran.code == 0
    assert "  8:12 │  4   │  5   │" in ran.out
    assert "mesh     <x=4, y=2>, 8 devices" in ran.out
    assert "tile     4 x 8, 128 B a device" in ran.out
    assert "copies   1 of every element" in ran.out


def test_show_draws_strips_that_fit(call):
    ran = call("show", *MESH, "f32[6{x}64]", columns=80)
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ran.out.count("4-5") == 6
    assert "copies   2 of every element: the same along y" in ran.out


def test_show_lists_devices_for_more_dims(call):
    ran = call("show", *MESH, "f32[2{y}4, 16, 3{x}2]")
    assert re.search(r"3 +1 +1 +4:8, 12:16 +0:16 +2:4, 10:12, 18:20\n", ran.out)


def test_show_tells_padding_and_empty_pieces(call):
    ran = call("show", *MESH, "f32[{x}{y}2/9]")
    assert "dim 0 from 9 to 16, the last piece is 1 of 2, 3 pieces without data" in ran.out
    assert "8:9" in ran.out
    assert "9:16" not in ran.out


def test_show_draws_partial_sums(call):
    ran = call("show", *MESH, "f32[{y}8, 16] + sum{x}")
    assert "0 + 2 + 4 + 6" in ran.out
    assert "the true array is the sum of 4 arrays of this shape, along x" in ran.out


def test_show_cuts_what_is_large_and_says_so(call):
    ran = call("show", "--mesh", "x=1024,y=1024", "bf16[{x}1000000, {y}4096, 128]", "--limit", "10", columns=80)
    lines = ran.out.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 80
    assert "... and 1019 more pieces of dim 0, up to 1024000000" in lines
    assert "... and 1048566 more devices; --limit shows more rows" in lines


@pytest.mark.parametrize("layout", ["f32[]", "f32[7]", "f32[3, 5]", "f32[2, 3, 4]", "f32[] + sum{y}", "pred[0, {x}4]"])
def test_show_draws_every_rank(call, layout):
    ran = call("show", *MESH, layout)
    assert ran.code == 0
    assert ("empty" in ran.out) == layout.startswith("pred[0")


def test_pieces_and_ranges_are_what_the_layout_means():
    chance = random.Random(2)
    for mesh in (rs.Mesh(x=4, y=2), rs.Mesh(x=3, y=4, device_ids=range(11, -1, -1))):
        for _ in range(100):
            layout = random_layout(chance, mesh, (24, 10))
            for device in mesh.devices:
                held = meaning(layout, device)
                for dim, found in zip(layout.dims, held, strict=True):
                    runs = [i for run in ranges(dim, mesh, mesh.position(device)) for i in range(*run)]
                    assert runs == [i for i in found if i < dim.size]
            for at, dim in enumerate(layout.dims):
                cells = list(pieces(dim))
                assert [i for cell in cells for i in range(cell.start, cell.stop)] == list(range(dim.size))
                for cell in cells:
                    found, count = owners(mesh, fixed(dim, mesh, cell.number))
                    assert len(found) == count
                    assert found == sorted(d for d in mesh.devices if cell.start in meaning(layout, d)[at])


def test_the_devices_of_a_huge_mesh_are_counted_not_listed():
    layout = rs.Layout.parse("f32[4] + sum{y}", rs.Mesh(x=1 << 20, y=1 << 20))
    assert label(layout, []) == "0,1048576,.. (1048576) + 1,1048577,.. (1048576) + .. (1048576)"


# ---- simulate --------------------------------------------------------------------------------------

SIMULATED = [
    (SOURCE, TARGET),
    ("f32[{x}3/10]", "f32[{y}5]"),
    ("bf16[2{x}4, {y}8]", "bf16[{y}16, {x}4]"),
    ("s4[{x}4]", "s4[16]"),
    ("pred[{x}4, 2]", "pred[16, {y}1]"),
    ("c64[{x}4] + sum{y}", "c64[{x}{y}2]"),
    ("f8e5m2[8, 4] + mean{x}", "f8e5m2[{x}2, 4]"),
    ("f8e8m0fnu[{x}4]", "f8e8m0fnu[16]"),
    ("u8[8] + sum{x}{y}", "u8[{x}2] + sum{y}"),
    ("s32[8] + product{x}", "s32[8]"),
    ("pred[8] + max{x}", "pred[{y}4]"),
    ("f64[10] + min{y}", "f64[{x}3/10]"),
    ("f32[] + sum{x}", "f32[]"),
    ("f32[0, 4]", "f32[0, {x}1]"),
    ("s2[{x}4]", "s2[{y}8]"),
]


@pytest.mark.parametrize(("source", "target"), SIMULATED)
def test_simulate_runs_and_checks(call, source, target):
    ran = call("simulate", *MESH, source, target, "--seed", "3")
    assert ran.code == 0, ran.out + ran.err
    assert "right: each of the 8 devices holds what the target says" in ran.out
    assert ran.out.count("kept") == 3


def test_simulate_follows_every_option(call):
    ran = call("simulate", *MESH, SOURCE, TARGET, "--budget", "4KiB", "--network", "h100", "--donate")
    assert ran.code == 0
    assert "exchange" in ran.out
    assert "seconds" in ran.out


def test_simulate_on_other_device_orders(call):
    ran = call("simulate", "{devices=[4,2]0,2,1,3,7,6,5,4}", "{devices=[2,4]<=[8]}", "--shape", "8,8", "--dtype", "f32")
    assert ran.code == 0, ran.out + ran.err


def _planted(change):
    def run(plan, tiles, memory):
        found = rs.simulate(plan, tiles, memory)
        return change(found) or found

    return run


def _one_element(tiles):
    tiles[5] = tiles[5].copy()
    tiles[5][3, 1, 2] += 1


def _swapped(tiles):
    tiles[0], tiles[1] = tiles[1], tiles[0]


def _lost(tiles):
    del tiles[7]


def _transposed(tiles):
    tiles[2] = tiles[2].transpose(2, 1, 0)[:1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_one_element, "WRONG: 1 element on 1 of 8 devices"),
        (_swapped, "on 2 of 8 devices"),
        (_lost, "device 7: 1 wrong, first at global (): no tile"),
        (_transposed, "device 2: 1 wrong, first at global (): shape (1, 2, 16)"),
    ],
)
def test_simulate_finds_a_planted_fault(call, monkeypatch, change, said):
    monkeypatch.setattr(simulate, "simulate", _planted(change))
    ran = call("simulate", *MESH, SOURCE, TARGET)
    assert ran.code == 1
    assert said in ran.out


def test_simulate_says_where_the_first_fault_is(call, monkeypatch):
    monkeypatch.setattr(simulate, "simulate", _planted(_one_element))
    assert "device 5: 1 wrong, first at global (3, 11, 2):" in call("simulate", *MESH, SOURCE, TARGET).out


def test_simulate_finds_a_partial_sum_that_is_off(call, monkeypatch):
    monkeypatch.setattr(simulate, "simulate", _planted(lambda tiles: {d: t * 1.001 for d, t in tiles.items()}))
    assert call("simulate", *MESH, "f32[8, 16] + sum{x}", "f32[{x}2, 16]").code == 1


def test_simulate_finds_a_broken_promise(call, monkeypatch):
    def greedy(plan, tiles, memory):
        found = rs.simulate(plan, tiles, memory)
        memory.receive(0, 1024)
        return found

    monkeypatch.setattr(simulate, "simulate", greedy)
    ran = call("simulate", *MESH, SOURCE, TARGET)
    assert ran.code == 1
    assert "BROKEN" in ran.out


def test_simulate_without_ml_dtypes_says_what_to_install(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    ran = call("simulate", *MESH, "bf16[{x}4]", "bf16[16]")
    assert ran.code == 2
    assert "install ml_dtypes" in ran.err


def test_random_data_differs_by_seed_and_not_by_run():
    layout = rs.Layout.parse("f32[{x}4]", rs.Mesh(x=4))
    tiles = [trial.Trial(layout, layout, seed).source_tiles()[0] for seed in (1, 1, 2)]
    assert np.array_equal(tiles[0], tiles[1])
    assert not np.array_equal(tiles[0], tiles[2])


# ---- help, version, width and colour ---------------------------------------------------------------


def _help(*command: str) -> str:
    found = parser()
    for name in command:
        found = found._subparsers._group_actions[0].choices[name]
    return found.format_help()


def _examples() -> list[str]:
    found = []
    for text in (_help(), *(_help(name) for name in COMMANDS)):
        joined = text.replace("\\\n", " ")
        lines = (line for line in joined.splitlines() if re.match(rf"  reshard ({'|'.join(COMMANDS)}) ", line))
        found += [line.strip() for line in lines]
    return found


def test_each_help_has_examples():
    for name in COMMANDS:
        assert sum(f"reshard {name} " in example for example in _examples()) >= 3


@pytest.mark.parametrize("example", dict.fromkeys(_examples()))
def test_an_example_of_the_help_runs(call, example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Some write files.
    ran = call(*shlex.split(example)[1:], columns=80)
    assert (ran.code, ran.err) == (0, ""), ran.out
    assert max(map(len, ran.out.splitlines()), default=0) <= 80 or "--json" in example


def test_help_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(len(line) for name in COMMANDS for line in _help(name).splitlines()) <= 80


def test_version(call):
    ran = call("--version")
    assert (ran.code, ran.out.strip()) == (0, f"reshard {rs.__version__}")


def _process(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR"}}
    full = {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **env}
    command = [sys.executable, "-m", "reshard", *argv]
    return subprocess.run(command, env=full, capture_output=True, encoding="utf-8", timeout=60, check=False)


def test_a_pipe_gets_no_colour_and_no_wrapped_rows():
    layouts = [f"f32[{', '.join(dims)}]" for dims in (["{x}4", *["16"] * 40], ["16", "{x}4", *["16"] * 39])]
    ran = _process("plan", *MESH, *layouts, PYTHONUTF8="1")
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout
    assert layouts[1] in next(line for line in ran.stdout.splitlines() if "all_to_all" in line)


def test_a_narrow_terminal_loses_no_number(call):
    out = call("plan", *MESH, SOURCE, TARGET, "--network", "h100", columns=40).out
    assert "all_gather" in out
    assert "seconds" in out
    assert "…" not in out


def test_a_terminal_that_is_ascii_is_served():
    ran = _process("show", *MESH, "f32[{x}4, {y}8]", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.returncode == 0, ran.stderr
    assert "|  8:12 |  4   |  5   |" in ran.stdout


def test_a_reader_that_stops_is_no_error():
    layouts = f"'{SOURCE}' '{TARGET}'"
    command = f"{sys.executable} -m reshard plan --mesh x=4,y=2 {layouts} --explain | head -0; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("0", "")


def test_the_command_loads_no_jax():
    code = "import sys, reshard.cli as c; c.main(sys.argv[1:]); print([m for m in ('jax', 'z3') if m in sys.modules])"
    command = [sys.executable, "-c", code, "plan", "--mesh", "x=0", SOURCE, TARGET]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stderr.startswith("reshard: error: ")
    assert ran.stdout == "[]\n"


# ---- errors ----------------------------------------------------------------------------------------

PAIR = (SOURCE, TARGET)
BAD = [
    (("plan", *PAIR), "give the mesh: --mesh x=4,y=2"),
    (("plan", *MESH, "P('y')", "P('x')"), "give shape and dtype: --shape 16,16 --dtype f32"),
    (("plan", *MESH, "P('y')", "P('x')", "--shape", "4"), "give dtype: --dtype f32"),
    (("plan", "P('y')", "P('x')", *ARRAY), "give the mesh: --mesh x=4,y=2"),
    (("plan", "--mesh", "x=4;y=2", *PAIR), "write axes as name=size"),
    (("plan", "--mesh", "x=0", *PAIR), "at least 1"),
    (("plan", "--mesh", "x=4,x=2", *PAIR), "occurs twice"),
    (("plan", *MESH, "f32[{z}4]", "f32[16]"), "unknown axis 'z': mesh <x=4, y=2> has axes x, y"),
    (("plan", *MESH, "f32[{x}4, {x}4]", "f32[16, 16]"), "single use"),
    (("plan", *MESH, "f32[{x}4", "f32[16]"), "f32[{x}4"),
    (("plan", *MESH, "nonsense", "f32[16]"), "cannot tell the notation of 'nonsense'"),
    (("plan", *MESH, "f32[{x}4]", "f32[{x}8]"), "give both the same global shape"),
    (("plan", *MESH, "f32[{x}4]", "bf16[16]"), "cast before or after"),
    (("plan", *MESH, "q7[{x}4]", "f32[16]"), "unknown dtype 'q7'"),
    (("plan", *MESH, "f32[16]", "f32[16] + sum{x}"), "can only finish a reduction"),
    (("plan", *MESH, *PAIR, "--shape", "16,16"), "has global shape (16, 16, 16), not (16, 16)"),
    (("plan", *MESH, *PAIR, "--shape", "16,a"), "cannot read the shape '16,a'"),
    (("plan", *MESH, *PAIR, "--dtype", "f64"), "has dtype float32, not float64"),
    (("plan", *MESH, *PAIR, "--budget", "64 bananas"), "cannot read the size '64 bananas'"),
    (("plan", *MESH, *PAIR, "--budget", "much"), "cannot read the size 'much'"),
    (("plan", *MESH, *PAIR, "--budget=-1MiB"), "cannot read the size '-1MiB'"),
    (("plan", *MESH, *PAIR, "--budget", "1.2.3GB"), "cannot read the size '1.2.3GB'"),
    (("plan", *MESH, *PAIR, "--budget", "4095"), "the smallest that works is 4096 B"),
    (("plan", *MESH, *PAIR, "--network", "tpu-v99"), "tpu-v99"),
    (("plan", *MESH, *PAIR, "--target-mesh", "x=4,y=2,z=2"), "different devices"),
    (("plan", *MESH, SOURCE, "{devices=[1,4,1]<=[4]}"), "4"),
    (("plan", *MESH, SOURCE, "{devices=[1,8,1]<=[4,2]T(1,1)}"), "T(1,1)"),
    (("plan", *MESH, SOURCE, "{maximal device=0}"), "maximal"),
    (("plan", *MESH, SOURCE, "[{}, {}, {}, {}]"), "global shape (16, 16, 16)"),
    (("show", *MESH, "f32[{x}4]", "--limit", "0"), "--limit 0"),
    (("show", *MESH, "f32[{x}5/16]"), "exact cover"),
    (("simulate", *MESH, "f32[{x}65536, 65536]", "f32[262144, {x}16384]"), "times fewer elements"),
    (("simulate", "--mesh", "x=8192", "f32[{x}1]", "f32[8192]"), "at most 4096"),
    (("simulate", *MESH, *PAIR, "--seed", "-1"), "--seed -1"),
]


@pytest.mark.parametrize(("argv", "said"), BAD, ids=[said for _, said in BAD])
def test_a_bad_call_is_an_error_that_says_what_to_do(call, argv, said):
    ran = call(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("reshard: error: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "COMMAND"),
        (("move",), "move"),
        (("plan", SOURCE), "TARGET"),
        (("plan", *PAIR, "--frobnicate"), "--frobnicate"),
        (("plan", *PAIR, "--mesh"), "--mesh"),
        (("show",), "LAYOUT"),
        (("simulate", *PAIR, "--seed", "x"), "--seed"),
    ],
)
def test_a_call_that_does_not_parse_exits_with_2(call, argv, said):
    ran = call(*argv)
    assert ran.code == 2
    assert said in ran.err


def test_an_unknown_exception_is_not_swallowed(call, monkeypatch):
    def broken(*_):
        raise KeyError("planted")

    monkeypatch.setattr(simulate, "simulate", broken)
    with pytest.raises(KeyError, match="planted"):
        call("simulate", *MESH, SOURCE, TARGET)


@pytest.mark.parametrize(
    ("text", "size"), [("1KB", 1000), ("1kib", 1024), (".5GiB", 1 << 29), ("2 TB", 2 * 10**12), ("7b", 7), ("1.9", 1)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "B", "-1", "1e6", "0x10", "1 QB", "1,000", "NaN", "1.5.2"])
def test_bad_sizes(text):
    with pytest.raises(rs.errors.ReshardError, match="cannot read the size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["16x16", "16,16", "(16, 16)", "[16,16]", "16, 16,"])
def test_shapes(text):
    assert parse_shape(text) == (16, 16)


@pytest.mark.parametrize("text", ["16;16", "-1", "16,,16", "(16", "a", "1.5"])
def test_bad_shapes(text):
    with pytest.raises(rs.errors.ReshardError, match="cannot read the shape"):
        parse_shape(text)
