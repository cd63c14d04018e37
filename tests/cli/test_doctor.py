"""`reshard doctor`: programs and logs in files, forms of the report, exit codes, errors, a word when it takes long."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from reshard import hlo
from reshard.cli import program_commands as module
from reshard.cli.program_commands import report_progress
from reshard.doctor import examine
from reshard.types.units import seconds_text
from tests.cli.cases import ROOT
from tests.cli.compiled import COMPILED, GATHERED, MODULE, NOTHING
from tests.markup import Read

LOG = ROOT / "tests" / "doctor" / "data" / "train_0.12.0.1.log"


def test_a_compiled_program(call):
    code, out, err = call("doctor", COMPILED)
    assert (code, err) == (0, "")
    assert "1   train.py:17   all_gather" in out
    assert "f32[{y}256, 512, {x}64] -> f32[512, {x}{y}64, 256] on <x=4, y=2>" in out
    assert "near train.py:19   all_gather          1   32.0 KiB   receives little" in out


def test_a_program_to_compile(call):
    code, out, _ = call("doctor", MODULE)
    assert code == 0
    assert "1   train.py:18   2 all_gather" in out and "memory      464.2 MiB a device" in out


def test_a_portable_artifact(call, tmp_path):
    path = tmp_path / "step.mlirbc"
    assert call("pass", MODULE, "-o", path)[0] == 0
    code, out, _ = call("doctor", path, "--json")
    report = json.loads(out)
    assert (code, report["rebuilt"], report["wasted_bytes"]) == (0, 0, 0)


def test_from_stdin(call, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(COMPILED.read_bytes())))
    assert "train.py:17" in call("doctor", "-")[1]


def test_json_is_one_object(call):
    code, out, _ = call("doctor", COMPILED, "--json", "--all")
    report = json.loads(out)
    names = sorted(one["name"] for place in report["places"] for one in place["collectives"])
    wanted = hlo.collectives(hlo.parse(COMPILED.read_text()), every_branch=True)
    assert code == 0 and names == sorted(one.name for one in wanted)


def test_a_page(call, tmp_path):
    path = tmp_path / "report.html"
    code, out, _ = call("doctor", COMPILED, "--html", path)
    assert (code, out) == (0, "")
    assert "train.py:17" in Read(path.read_text(encoding="utf-8")).text


def test_all_and_network(call):
    out = call("doctor", COMPILED, "--all")[1]
    assert "summed by line" not in out and "2   near train.py:19   all_gather    32.0 KiB" in out
    data = json.loads(call("doctor", COMPILED, "--network", "tpu-v5p", "--json")[1])
    assert data["places"][0]["moves"][0]["plan"]["seconds"] > 0


@pytest.mark.parametrize(("text", "code"), [(COMPILED.read_text(), 1), (NOTHING, 0)])
def test_it_can_fail_on_a_rebuild(call, tmp_path, text, code):
    path = tmp_path / "step.hlo"
    path.write_text(text)
    assert call("doctor", path, "--fail-on-rebuild")[0] == code


def test_it_can_fail_on_bytes(call):
    received = json.loads(call("doctor", COMPILED, "--json")[1])["received_bytes"]
    assert call("doctor", COMPILED, "--json", "--max-received", received)[::2] == (0, "")
    code, _, err = call("doctor", COMPILED, "--json", "--max-received", received - 1)
    assert (code, err) == (1, f"reshard: {received} B received a device, more than --max-received {received - 1}\n")
    code, out, err = call("doctor", COMPILED, "--max-received", "much")
    assert (code, out) == (2, "") and "--max-received 'much'" in err
    assert "give the program for --max-received" in call("doctor", LOG, "--max-received", "1MiB")[2]


def test_a_network_says_how_long_plans_take(call):
    assert not re.search("^  time ", call("doctor", COMPILED)[1], re.MULTILINE)
    out = call("doctor", COMPILED, "--network", "tpu-v5p")[1]
    data = json.loads(call("doctor", COMPILED, "--network", "tpu-v5p", "--json", "--all")[1])
    moves = [move for place in data["places"] for move in place["moves"]]
    seconds = sum(move["plan"]["seconds"] for move in moves)
    text = f"  time        {seconds_text(seconds)} in reshard's plans by the network's figures, for 2 of 2 moves"
    assert text in out.splitlines() and len(moves) == 2


def test_where_no_detour_is_taken_advice_is_the_next_step(call, tmp_path):
    path = tmp_path / "gathered.hlo"
    path.write_text(GATHERED)
    assert "No detour here: `report.advise()`, or `--advise`, finds the constraint" in call("doctor", path)[1]
    assert "finds the constraint" not in call("doctor", COMPILED)[1]
    for program, hints in ((path, True), (COMPILED, False)):
        call("doctor", program, "--html", tmp_path / "page.html")
        assert ("finds the constraint" in (tmp_path / "page.html").read_text(encoding="utf-8")) is hints


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give optimized HLO"),
        (b"print('hello')", "is not a program: \"print('hello')\""),
        (b"\x0a\xff\x00\x80", "is binary, but not a portable StableHLO artifact"),
        (b"HloModule m\nHloModule n\n", "2 HloModule headers"),
        (b"module { func.func @main( }", "the program is not StableHLO"),
        (b"ML\xefR\x00\x00", "the program is not StableHLO"),
    ],
)
def test_other_files_are_refused(call, tmp_path, content, message):
    path = tmp_path / "step"
    path.write_bytes(content)
    code, out, err = call("doctor", path)
    assert (code, out) == (2, "") and err.startswith("reshard: error: ") and message in err


@pytest.mark.slow
def test_in_a_process_of_its_own():
    """A fresh process has no devices set up: the command makes as many as the program has partitions."""
    unset = {"XLA_FLAGS", "JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TF_CPP_MIN_LOG_LEVEL"}
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reshard", "doctor", str(MODULE), "--json"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["devices"], report["rebuilt"]) == (8, 1)
    assert "Involuntary full rematerialization" not in run.stderr  # The report has it.


def test_a_log(call, monkeypatch):
    code, out, err = call("doctor", LOG)
    assert (code, err) == (0, "")
    assert "1 array that XLA rebuilds whole on every device" in out
    assert "f32[{y}256, 512, {x}64] -> f32[512, {x}{y}64, 256] on <x=4, y=2>" in out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff noise\n" + LOG.read_bytes())))
    assert call("doctor", "-", "--fail-on-rebuild") == (1, out, "")


def test_a_log_has_no_page_and_is_no_program(call, tmp_path):
    code, out, err = call("doctor", LOG, "--html", tmp_path / "page.html")
    assert (code, out) == (2, "") and "a log has no page" in err
    code, out, err = call("pass", LOG)
    assert (code, out) == (2, "") and "is not a program" in err
    calm = tmp_path / "job.log"
    calm.write_text("step 1: loss 3.2\n")
    assert "a log with XLA's warnings" in call("doctor", calm)[2]


@pytest.mark.parametrize(
    ("options", "platform"),
    [(["--topology", "v5p:2x2x2"], "tpu"), ([], "cpu"), (["--platform", "gpu", "--topology", "h100"], "gpu")],
)
def test_a_topology_means_a_tpu(call, monkeypatch, options, platform):
    from reshard.jax import program_report as doctor

    calls: list = []
    monkeypatch.setattr(doctor, "report_program", lambda _, **given: calls.append(given) or examine(NOTHING))
    assert call("doctor", MODULE, *options)[0] == 0
    assert [given["platform"] for given in calls] == [platform]


class Waits(list[float]):
    """An event that is set during the fifth wait for it."""

    def wait(self, seconds: float) -> bool:
        self.append(seconds)
        return len(self) == 5

    def set(self) -> None: ...


def test_what_takes_long_says_so(capsys, monkeypatch: pytest.MonkeyPatch):
    waits = Waits()
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=lambda: waits, Thread=threading.Thread))
    with report_progress("compiling", patience=3):
        pass
    assert waits == [3, 3, 6, 12, 24]
    assert capsys.readouterr() == ("", "".join(f"reshard: compiling, {n} s so far\n" for n in (3, 6, 12, 24)))


ADVISED = """\
module @step attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["x"=8]>
  func.func public @main(%a: tensor<64x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
      -> (tensor<64x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
    %b = sdy.sharding_constraint %a <@mesh, [{}, {"x"}]> : tensor<64x64xf32>
    %c = stablehlo.add %b, %b : tensor<64x64xf32>
    return %c : tensor<64x64xf32>
  }
}
"""


def test_advice(call, tmp_path):
    path, page = tmp_path / "step.mlir", tmp_path / "report.html"
    path.write_text(ADVISED)
    code, out, _ = call("doctor", path, "--advise")
    assert code == 0 and "-:5  with_sharding_constraint(P(None, 'x')) -> removed" in out
    assert "saves 3584 B received" in out
    code, out, _ = call("doctor", path, "--advise", "--json", "--html", page)
    [change] = json.loads(out)["advice"]["changes"]
    assert (code, change["kind"], change["received_bytes"]) == (0, "constraint", 0)
    text = Read(page.read_text(encoding="utf-8")).text
    assert "Shardings to change" in text and "saves 3584 B received" in text


@pytest.mark.parametrize("file", [COMPILED, LOG])
def test_what_has_no_shardings_gets_no_advice(call, file):
    code, out, err = call("doctor", file, "--advise")
    assert (code, out) == (2, "") and "give its StableHLO" in err
