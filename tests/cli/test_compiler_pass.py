"""`reshard pass`: the transformed program, its report, and what is refused."""

import json

import pytest

from tests.cli.compiled import COMPILED, MODULE


def test_it_prints_the_program(call):
    code, out, _ = call("pass", MODULE)
    assert code == 0 and "sdy.manual_computation" in out and "stablehlo.all_to_all" in out


def test_it_writes_text_that_compiles_to_less(call, tmp_path):
    path = tmp_path / "ours.mlir"
    assert call("pass", MODULE, "-o", path)[:2] == (0, "")
    before, after = (json.loads(call("doctor", which, "--json")[1]) for which in (MODULE, path))
    assert (before["rebuilt"], after["rebuilt"], after["wasted_bytes"]) == (1, 0, 0)
    assert after["received_bytes"] == before["received_bytes"] - before["saved_bytes"]


def test_it_prints_a_report(call, tmp_path):
    code, out, _ = call("pass", MODULE, "--report", "-o", tmp_path / "ours.mlirbc")
    assert code == 0 and out.splitlines()[0] == "1 reshard taken, 1 left"
    assert "train.py:18" in out and "all_to_all" in out and "left: XLA does it" in out
    assert (tmp_path / "ours.mlirbc").read_bytes().startswith(b"ML\xefR")


def test_it_prints_the_report_as_json(call):
    code, out, _ = call("pass", MODULE, "--json", "--network", "tpu-v5p", "--budget", "1GiB")
    reshards = json.loads(out)["reshards"]
    assert code == 0 and [one["taken"] for one in reshards if one["plan"]].count(True) == 1
    assert all(one["plan"]["seconds"] is not None for one in reshards if one["plan"])


def test_it_refuses_a_compiled_program(call):
    code, _, err = call("pass", COMPILED)
    assert code == 2 and "is HLO, which is partitioned already" in err


@pytest.mark.parametrize("options", [["--budget", "much"], ["--network", "none"]])
def test_it_refuses_bad_options(call, options):
    assert call("pass", MODULE, *options)[0] == 2
