"""`reshard files`: what is stored, and whether it is intact."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import reshard as rs
from reshard.plans.stored import Checkpoint


def test_tensors_are_shown(call, tmp_path: Path):
    np.save(tmp_path / "w.npy", np.arange(6, dtype="float32").reshape(2, 3))
    ran = call("files", "show", str(tmp_path))
    assert (ran.code, ran.err) == (0, "") and "f32[2, 3]" in ran.out


def test_all_tensors_and_json(call, tmp_path: Path):
    for number in range(45):
        np.save(tmp_path / f"w{number}.npy", np.zeros(number + 1))
    ran = call("files", "show", str(tmp_path))
    assert "... and 5 rows more" in ran.out and "f64[10]" not in ran.out
    assert "f64[10]" in call("files", "show", "--all", str(tmp_path)).out
    ckpt = Checkpoint.from_json(call("files", "show", "--json", str(tmp_path)).out)
    assert ckpt == rs.files.open(tmp_path)


def test_a_command_of_commands_names_those_that_it_has(call):
    ran = call("files", "shw", "x")
    assert ran.code == 2 and "'files shw'" in ran.err and "did you mean 'files show'?" in ran.err
    ran = call("files", "show", "--jsn", "x")
    assert ran.code == 2 and "did you mean '--json'?" in ran.err
    assert call("files").code == 2


def test_a_check_says_what_it_compared_and_ends_with_1_for_faults(call, tmp_path: Path):
    np.save(tmp_path / "w.npy", np.arange(6, dtype="float32"))
    assert "24 B  without a checksum" in call("files", "check", "--record", str(tmp_path)).out
    ran = call("files", "check", str(tmp_path))
    assert ran.code == 0 and "no fault" in ran.out and "without" not in ran.out
    content = bytearray((tmp_path / "w.npy").read_bytes())
    content[-3] ^= 1
    (tmp_path / "w.npy").write_bytes(content)
    ran = call("files", "check", str(tmp_path))
    assert (ran.code, ran.err) == (1, "") and "1 fault" in ran.out and "w.npy" in ran.out


def test_what_cannot_be_opened_is_an_error(call, tmp_path: Path):
    ran = call("files", "check", str(tmp_path / "nothing"))
    assert (ran.code, ran.out) == (2, "") and "nothing" in ran.err


def test_arrays_get_other_chunks_by_the_plan_that_is_printed(call, tmp_path: Path):
    data = np.arange(96, dtype="float32").reshape(8, 12)
    np.save(tmp_path / "w.npy", data)
    asked = ("--chunks", "8,3", "--memory", "1MiB", "--format", "zarr")
    planned = call("files", "rechunk", str(tmp_path / "w.npy"), *asked)
    assert planned.code == 0 and "direct, 1 pass" in planned.out and not (tmp_path / "out").exists()
    ran = call("files", "rechunk", str(tmp_path / "w.npy"), str(tmp_path / "out"), *asked)
    assert ran.out == planned.out
    back = call("files", "rechunk", str(tmp_path / "out"), str(tmp_path / "b.npy"), *asked[:4], "--format", "npy")
    assert back.code == 0 and np.array_equal(np.load(tmp_path / "b.npy"), data)
    ran = call("files", "rechunk", str(tmp_path / "out"), "--chunks", "8,x", "--memory", "1MiB")
    assert ran.code == 2 and "cannot read the chunks '8,x'" in ran.err


def test_a_load_is_planned_by_rules(call, tmp_path: Path):
    """The first rule that fits counts, those of the call before those of a file; what none names is replicated."""
    np.save(tmp_path / "o.npy", np.zeros((64, 32), "float32"))
    np.save(tmp_path / "q.npy", np.zeros((64, 32), "float32"))
    np.save(tmp_path / "norm.npy", np.zeros(32, "float32"))
    rules = tmp_path / "rules.toml"
    rules.write_text('[layouts]\no = "P(None, \'tp\')"\n"?" = "P(\'tp\')"\n')
    ran = call("load", "--mesh", "rep=2,tp=2", str(tmp_path), "--rules", str(rules), "--json")
    plan = rs.files.LoadPlan.from_json(ran.out)
    assert {name: str(layout) for name, layout in plan.targets.items()} == {
        "norm": "f32[32]",
        "o": "f32[64, {tp}16]",
        "q": "f32[{tp}32, 32]",
    }
    more = "--rule", "*=[Replicate(), Replicate()]", "--processes", "2"
    ran = call("load", "--mesh", "rep=2,tp=2", str(tmp_path), "--rules", str(rules), *more)
    assert "3 tensors, 16.1 KiB in 3 files (npy), 1.00 of them read" in ran.out
    assert "a target-driven loader reads 2.00x" in ran.out


def test_rules_and_sizes_that_cannot_be_read_are_refused(call, tmp_path: Path):
    np.save(tmp_path / "w.npy", np.zeros(8, "float32"))
    wrong = {
        ("--rule", "w"): "write PATTERN=SPEC",
        ("--rule", "w=P('x')"): "'w': ",
        ("--rules", str(tmp_path / "none.toml")): "cannot be read",
        ("--rules", str(tmp_path / "w.npy")): "cannot be read",
        ("--size", "tp"): "write NAME=N",
        ("--processes", "x"): "divides",
        ("--budget", "8B"): "the smallest that works is",
        ("--read-size", "0"): "at least 1 byte",
    }
    for options, message in wrong.items():
        ran = call("load", "--mesh", "tp=2", str(tmp_path), *options)
        assert ran.code == 2 and message in ran.err, (options, ran.err)
