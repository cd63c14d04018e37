"""`reshard doctor` and `reshard pass`: programs in files, what is printed, exit codes and errors."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from reshard import hlo
from reshard.cli import main
from reshard.cli.arguments import parse, parser
from tests.markup import Read

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "doctor" / "data"
MODULE, COMPILED = DATA / "train.mlir", DATA / "train_v5p_0.12.0.1.hlo"
NOTHING = "HloModule m, num_partitions=4\n\nENTRY %main {\n  ROOT %p = f32[2]{0} parameter(0)\n}\n"


@pytest.fixture
def call(capsys, monkeypatch):
    """Calls the command in this process; code, stdout, stderr."""
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TF_CPP_MIN_LOG_LEVEL"):  # what it sets where nothing is set
        monkeypatch.setenv(name, os.environ.get(name, "0"))

    def called(*argv, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


# ---- doctor


def test_a_compiled_program(call):
    code, out, err = call("doctor", COMPILED)
    assert (code, err) == (0, "")
    assert "1   train.py:17   all_gather" in out
    assert "f32[{y}256, 512, {x}64] -> f32[512, {x}{y}64, 256] on <x=4, y=2>" in out
    assert "not shown: 1 place that receives little" in out


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
    code, out, _ = call("doctor", COMPILED, "--json")
    report = json.loads(out)
    found = sorted(one["name"] for place in report["places"] for one in place["collectives"])
    wanted = hlo.collectives(hlo.parse(COMPILED.read_text()), every_branch=True)
    assert code == 0 and found == sorted(one.name for one in wanted)


def test_a_page(call, tmp_path):
    path = tmp_path / "report.html"
    code, out, _ = call("doctor", COMPILED, "--html", path)
    assert (code, out) == (0, "")
    assert "train.py:17" in Read(path.read_text(encoding="utf-8")).text


def test_all_and_network(call):
    out = call("doctor", COMPILED, "--all")[1]
    assert "not shown" not in out and out.count("all_gather") > call("doctor", COMPILED)[1].count("all_gather")
    data = json.loads(call("doctor", COMPILED, "--network", "tpu-v5p", "--json")[1])
    assert data["places"][0]["moves"][0]["plan"]["seconds"] > 0


@pytest.mark.parametrize(("text", "code"), [(COMPILED.read_text(), 1), (NOTHING, 0)])
def test_it_can_fail_on_a_rebuild(call, tmp_path, text, code):
    path = tmp_path / "step.hlo"
    path.write_text(text)
    assert call("doctor", path, "--fail-on-rebuild")[0] == code


def test_nothing_moves(call, tmp_path):
    path = tmp_path / "step.txt"
    path.write_text(NOTHING)
    assert call("doctor", path) == (0, "m on 4 devices: no data moves between devices\n", "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; give optimized HLO"),
        (b"print('hello')", "is no program: \"print('hello')\""),
        (b"\x0a\xff\x00\x80", "is binary, and no portable StableHLO artifact"),
        (b"HloModule m\nHloModule n\n", "2 HloModule headers"),
        (b"module { func.func @main( }", "the program is no StableHLO"),
        (b"ML\xefR\x00\x00", "the program is no StableHLO"),
    ],
)
def test_what_is_no_program_is_refused(call, tmp_path, content, said):
    path = tmp_path / "step"
    path.write_bytes(content)
    code, out, err = call("doctor", path)
    assert (code, out) == (2, "") and err.startswith("reshard: error: ") and said in err


@pytest.mark.parametrize("argv", [["doctor", "none.hlo"], ["pass", "none.mlir"]])
def test_a_file_that_is_not_there(call, argv):
    code, _, err = call(*argv)
    assert code == 2 and "cannot read none" in err and "No such file" in err


def test_a_page_that_cannot_be_written(call, tmp_path):
    code, _, err = call("doctor", COMPILED, "--html", tmp_path / "none" / "report.html")
    assert code == 2 and "cannot write" in err


def test_in_a_process_of_its_own():
    """With no devices set up: as many are made as the program has partitions."""
    unset = {"XLA_FLAGS", "JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TF_CPP_MIN_LOG_LEVEL"}
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reshard", "doctor", str(MODULE), "--json"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["devices"], report["rebuilt"]) == (8, 1)
    assert "Involuntary full rematerialization" not in run.stderr  # it is in the report


# ---- pass


def test_pass_prints_the_program(call):
    code, out, _ = call("pass", MODULE)
    assert code == 0 and "sdy.manual_computation" in out and "stablehlo.all_to_all" in out


def test_pass_writes_text_that_compiles_to_less(call, tmp_path):
    path = tmp_path / "ours.mlir"
    assert call("pass", MODULE, "-o", path)[:2] == (0, "")
    before, after = (json.loads(call("doctor", which, "--json")[1]) for which in (MODULE, path))
    assert (before["rebuilt"], after["rebuilt"], after["wasted_bytes"]) == (1, 0, 0)
    assert after["received_bytes"] == before["received_bytes"] - before["saved_bytes"]


def test_pass_reports(call, tmp_path):
    code, out, _ = call("pass", MODULE, "--report", "-o", tmp_path / "ours.mlirbc")
    assert code == 0 and out.splitlines()[0] == "1 reshard taken, 1 left"
    assert "train.py:18" in out and "all_to_all" in out and "left: XLA does it" in out
    assert (tmp_path / "ours.mlirbc").read_bytes().startswith(b"ML\xefR")


def test_pass_reports_as_json(call):
    code, out, _ = call("pass", MODULE, "--json", "--network", "tpu-v5p", "--budget", "1GiB")
    found = json.loads(out)["reshards"]
    assert code == 0 and [one["taken"] for one in found if one["plan"]].count(True) == 1
    assert all(one["plan"]["seconds"] is not None for one in found if one["plan"])


def test_pass_refuses_a_compiled_program(call):
    code, _, err = call("pass", COMPILED)
    assert code == 2 and "is HLO, which is partitioned already" in err


@pytest.mark.parametrize("options", [["--budget", "much"], ["--network", "none"]])
def test_pass_refuses_bad_options(call, options):
    assert call("pass", MODULE, *options)[0] == 2


# ---- help


@pytest.mark.parametrize("name", ["doctor", "pass"])
def test_the_help_fits_and_its_examples_parse(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = parser()._subparsers._group_actions[0].choices[name].format_help()
    examples = [line.strip() for line in text.splitlines() if line.startswith(f"  reshard {name} ")]
    assert max(map(len, text.splitlines())) <= 80 and len(examples) >= 3
    for example in examples:
        assert parse(shlex.split(example)[1:]).file == "step.mlir" or "hlo" in example


def test_the_device_count_is_what_the_tests_have():
    assert len(jax.devices()) == 8
