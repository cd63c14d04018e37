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


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], ("cpu", None, "bytes")),
        (["--prefer", "time"], ("cpu", None, "time")),
        (["--topology", "v5p:2x2x2"], ("tpu", "v5p:2x2x2", "bytes")),
    ],
)
def test_what_hlo_is_improved_for(call, monkeypatch, options, given):
    from reshard.jax.xla_pass import hlo_files

    def improve(program, *, platform, topology, prefer, **_):
        assert (platform, topology, prefer) == given
        return hlo_files.ImprovedHlo(b"", (), 8, False)

    monkeypatch.setattr(hlo_files, "improve_hlo", improve)
    assert call("pass", COMPILED, "--report", *options)[0] == 0


def test_nothing_is_preferred_in_stablehlo(call):
    code, _, err = call("pass", MODULE, "--prefer", "memory")
    assert code == 2 and "leave --prefer out, or give the optimized HLO" in err


def test_long_lists_of_what_is_left_are_cut(capsys):
    from reshard.cli.program_commands import warn_of_left
    from reshard.jax.pass_report import PassReport, Reshard

    left = Reshard("a.py:1", "op", True, None, None, None, False, "no plan")
    warn_of_left(PassReport((left,) * 11))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reshard: left to XLA: a.py:1: cannot be planned: left, no plan" and len(lines) == 9
    assert lines[-1] == "reshard: left to XLA: 3 more; --report lists them all"
    warn_of_left(PassReport((Reshard("a.py:1", "op", True, None, None, None, True),)))
    assert capsys.readouterr().err == ""


def test_it_prints_the_report_as_json(call):
    code, out, _ = call("pass", MODULE, "--json", "--network", "tpu-v5p", "--budget", "1GiB")
    reshards = json.loads(out)["reshards"]
    assert code == 0 and [one["taken"] for one in reshards if one["plan"]].count(True) == 1
    assert all(one["plan"]["seconds"] is not None for one in reshards if one["plan"])


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory):
    """The program of jax-ml/jax#21562 as XLA compiles it: its text and its proto, in files."""
    import jax

    from reshard.jax.program_report import optimized_text
    from tests.jax.moving import numbered, program

    compiled = jax.jit(program).lower(numbered()).compile()
    folder = tmp_path_factory.mktemp("hlo")
    (folder / "step.hlo").write_text(optimized_text(compiled))
    module = compiled.runtime_executable().hlo_modules()[0]
    (folder / "step.pb").write_bytes(module.as_serialized_hlo_module_proto())
    return folder


def received(call, path):
    return json.loads(call("doctor", path, "--json")[1])["received_bytes"]


def test_hlo_text_becomes_better_text(call, partitioned, tmp_path):
    path = tmp_path / "better.hlo"
    code, out, err = call("pass", partitioned / "step.hlo", "-o", path, "--report")
    assert code == 0 and out.splitlines()[0] == "1 chain of 1 replaced" and "the schedule is left out" in err
    assert "moving.py" in out and "2 all_gather" in out and "all_to_all" in out
    assert (received(call, partitioned / "step.hlo"), received(call, path)) == (14336, 1792)


def test_a_proto_becomes_a_proto_or_text(call, partitioned, tmp_path):
    from reshard.hlo.proto import ModuleProto

    path = tmp_path / "better.pb"
    assert call("pass", partitioned / "step.pb", "--devices", "8", "-o", path)[0] == 0
    opcodes = [one.opcode for one in ModuleProto.decode(path.read_bytes()).instructions()]
    assert "all-to-all" in opcodes and "all-gather" not in opcodes
    code, out, _ = call("pass", partitioned / "step.pb", "--devices", "8")
    assert code == 0 and out.startswith("HloModule") and "num_partitions=8" in out.splitlines()[0]
    (chain,) = json.loads(call("pass", partitioned / "step.pb", "--devices", "8", "--json")[1])["chains"]
    assert chain["replaced"] and chain["planned_bytes"] == 1792


def test_hlo_that_stays_is_written_as_it_was(call, partitioned, tmp_path):
    path = tmp_path / "same.pb"
    arguments = ("pass", partitioned / "step.pb", "--devices", "8", "--budget", "10", "-o", path, "--report")
    code, out, err = call(*arguments)
    assert code == 0 and "left: budget 10 B is too small" in " ".join(out.split()) and err == ""
    assert path.read_bytes() == (partitioned / "step.pb").read_bytes()


def test_hlo_that_cannot_be_improved_is_refused(call, partitioned, tmp_path):
    assert "--devices 8" in call("pass", partitioned / "step.pb")[2]
    elided = tmp_path / "elided.hlo"
    elided.write_text((partitioned / "step.hlo").read_text() + "\n// constant({...})\n")
    assert "leaves large constants out" in call("pass", elided)[2]
    broken = tmp_path / "broken.hlo"
    broken.write_text("HloModule m, num_partitions=8\n\nENTRY e {\n  ROOT r = f32[2] nonsense()\n}\n")
    code, _, err = call("pass", broken)
    assert code == 2 and "XLA does not read the HLO text" in err
    code, _, err = call("pass", partitioned / "step.hlo", "--platform", "none")
    assert code == 2 and "none" in err
    code, _, err = call("pass", partitioned / "step.hlo", "--devices", "4096")
    assert code == 2 and "has 8 partitions" in err
