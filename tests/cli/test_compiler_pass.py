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


def test_it_says_what_it_left_where_no_report_is_wanted(call, tmp_path):
    """A budget that nothing meets leaves the program as it was, which its text does not show."""
    output = tmp_path / "ours.mlir"
    code, out, err = call("pass", MODULE, "--budget", "1", "-o", output)
    assert (code, out) == (0, "")
    assert err.count("left to XLA") == err.count("budget 1 B is too small") == 2
    assert "train.py:18" in err and "f32[{y}256, 512, {x}64] -> f32[512, {x}{y}64, 256]" in err
    for option in ("--report", "--json"):
        assert call("pass", MODULE, "--budget", "1", option)[2] == ""


def test_long_lists_of_what_is_left_are_cut(capsys):
    from reshard.cli.compiler_pass import _warn
    from reshard.jax.pass_report import PassReport, Reshard

    left = Reshard("a.py:1", "op", True, None, None, None, False, "no plan")
    _warn(PassReport((left,) * 11))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reshard: left to XLA: a.py:1: cannot be planned: left, no plan" and len(lines) == 9
    assert lines[-1] == "reshard: left to XLA: 3 more; --report lists them all"
    _warn(PassReport((Reshard("a.py:1", "op", True, None, None, None, True),)))
    assert capsys.readouterr().err == ""


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
