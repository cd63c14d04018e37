"""`reshard plan`: the table, JSON, a page, and the reasons."""

import json
import re
import sys

import pytest

import reshard as rs
from reshard.plans.plan import Plan, Step
from tests.cli.cases import MESH, SOURCE, TARGET
from tests.markup import Read, check_self_contained

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


def test_it_prints_a_table(call):
    ran = call("plan", *MESH, SOURCE, TARGET)
    assert (ran.code, ran.out, ran.err) == (0, GOLDEN, "")


def test_json_is_one_object_that_reads_back(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", "tpu-v5p", "--json")
    data = json.loads(ran.out)
    totals = {"source", "target", "steps", "received_bytes", "lower_bound_bytes", "launches", "peak_bytes", "seconds"}
    assert totals <= data.keys()
    for step in data["steps"]:
        assert {"kind", "operand", "result", "received_bytes", "live_bytes"} <= step.keys()
    assert (data["source"], data["target"]) == (SOURCE, TARGET)
    assert data["received_bytes"] >= data["lower_bound_bytes"] == 1792
    assert rs.Plan.from_json(ran.out).seconds == data["seconds"] > 0


def test_a_network_adds_seconds(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", "h100")
    assert "seconds" in ran.out
    assert re.search(r"predicted +[0-9.]+ us on h100", ran.out)


def test_it_reads_a_network_file(call, tmp_path):
    path = tmp_path / "lab.json"
    path.write_text(rs.Network.uniform(1e-3, 1e9).to_json(), encoding="utf-8")
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", str(path), "--json")
    assert 1e-3 < json.loads(ran.out)["seconds"] < 1e-2


def test_equal_layouts_need_no_step(call):
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


def test_slack_trades_bytes_for_launches(call):
    pair = ("--mesh", "x=8,y=8", "f32[{x}{y}16/997, 4]", "f32[997, 4]")
    plans = [
        json.loads(call("plan", *pair, *slack, "--json").out) for slack in ((), ("--slack", "0.05"), ("--slack", "0"))
    ]
    assert plans[0] == plans[1]
    assert plans[0]["launches"] == 1 < plans[2]["launches"]
    assert plans[0]["received_bytes"] > plans[2]["received_bytes"] == plans[2]["lower_bound_bytes"]
    assert f"With --slack 0 it would receive {plans[2]['received_bytes'] / 1024:.1f} KiB" in call(
        "plan", *pair, "--explain"
    ).out.replace("\n     ", " ")


@pytest.mark.parametrize(
    ("slack", "why"),
    [("5 percent", "cannot read the slack '5 percent'"), ("-1", "slack -1.0: give"), ("nan", "slack nan: give")],
)
def test_slack_that_cannot_be_used(call, slack, why):
    ran = call("plan", *MESH, SOURCE, TARGET, f"--slack={slack}")
    assert ran.code != 0 and why in ran.err


# ---- --explain -------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("source", "target", "reason"), EXPLAINED, ids=[reason for *_, reason in EXPLAINED])
def test_explain_gives_the_reasons(call, source, target, reason):
    ran = call("plan", *MESH, source, target, "--explain")
    assert ran.code == 0
    assert reason in " ".join(ran.out.split())


def test_explain_names_the_effect_of_a_budget(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--explain", "--budget", "4096")
    words = " ".join(ran.out.split())
    assert "does not fit the budget" in words
    assert "messages of at most" in words


def test_explain_names_the_bytes_that_a_network_costs(call):
    request = ("plan", "--mesh", "dcn=2,x=4", "f32[{x}4,16]", "f32[{dcn}8,{x}4]", "--explain", "--network", "tpu-v5p")
    words = " ".join(call(*request).out.split())
    assert "Without --network the plan would receive" in words
    assert "are predicted on tpu-v5p" in words


# ---- --html ----------------------------------------------------------------------------------------


def test_it_writes_a_page_and_prints_nothing(call, tmp_path):
    path = tmp_path / "plan.html"
    assert call("plan", *MESH, SOURCE, TARGET, "--html", path, "--network", "tpu-v5p") == (0, "", "")
    read = Read(path.read_text(encoding="utf-8"))
    check_self_contained(read)
    assert "predicted on tpu-v5p" in read.text and "no longer split over y" in read.text


def test_it_prints_json_beside_a_page(call, tmp_path):
    path = tmp_path / "plan.html"
    ran = call("plan", *MESH, SOURCE, TARGET, "--html", path, "--json")
    assert ran.code == 0
    assert isinstance(Plan.from_json(ran.out).steps[0], Step) and path.exists()


def test_a_page_that_cannot_be_written_is_an_error(call, tmp_path):
    path = tmp_path / "none" / "plan.html"
    message = f"reshard: error: cannot write {path}: No such file or directory; "
    message += "give a file in a folder that is there and may be written\n"
    assert call("plan", *MESH, SOURCE, TARGET, "--html", path) == (2, "", message)


def test_a_page_needs_no_matplotlib(call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call("plan", *MESH, SOURCE, TARGET, "--html", tmp_path / "plan.html") == (0, "", "")
