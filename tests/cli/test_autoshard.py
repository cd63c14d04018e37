"""`reshard autoshard`: a StableHLO program with shardings chosen for it, its report, and what is refused."""

import ctypes
import json

import jax
import numpy as np
import pytest

import reshard.jax
from reshard.cli import main
from reshard.errors import MeshError, ProgramError
from reshard.synth.choice.linear_program import LinearProgram

PROGRAM = """
func.func public @main(%a: tensor<64x512xf32> loc("a"), %w: tensor<512x64xf32> loc("w")) -> tensor<64x64xf32> {
  %0 = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : (tensor<64x512xf32>, tensor<512x64xf32>)
    -> tensor<64x64xf32>
  return %0 : tensor<64x64xf32>
}
"""
MESH = ("--mesh", "x=4,y=2")


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "step.mlir"
    path.write_text(PROGRAM)
    return path


def test_it_prints_what_is_chosen(call, program):
    code, out, _ = call("autoshard", program, *MESH, "--network", "tpu-v5p")
    assert code == 0 and out.startswith("shardings on <x=4, y=2>, network tpu-v5p, no budget")
    assert "returned" in out


def test_it_writes_a_program_that_receives_what_it_says(call, program, tmp_path):
    path = tmp_path / "chosen.mlir"
    fixed = ("--fix", "0=P(None, 'x')", "--fix", "w=P('x')", "--fix", "result=P()")
    code, out, err = call("autoshard", program, *MESH, *fixed, "--json", "--compare", "none", "-o", path)
    told = json.loads(out)
    assert code == 0 and told["received_bytes"] > 0
    assert f"wrote {path}; reshard.jax.load_step runs it" in err
    assert [each["spec"] for each in told["arguments"]] == ["P(None, 'x')", "P('x', None)"]
    doctor = json.loads(call("doctor", path, "--json")[1])
    assert doctor["received_bytes"] == told["received_bytes"]
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    a, w = (np.random.default_rng(at).random(shape, "float32") for at, shape in enumerate(((64, 512), (512, 64))))
    [made] = reshard.jax.load_step(path.read_text(), mesh)(a, w)
    assert np.allclose(made, a @ w) and made.sharding.is_fully_replicated
    assert np.array_equal(reshard.jax.load_step(path, mesh)(a, w)[0], made)
    with pytest.raises(ProgramError, match="a str is a program's text"):
        reshard.jax.load_step(str(path), mesh)
    with pytest.raises(ProgramError, match=r"cannot be read.*other"):
        reshard.jax.load_step(tmp_path / "other", mesh)
    with pytest.raises(MeshError, match="give one of its axes"):
        reshard.jax.load_step(path, jax.make_mesh((2, 4), ("x", "y")))


def test_what_the_solver_prints_is_no_part_of_the_json(program, capfd, monkeypatch):
    solve = LinearProgram.solve

    def print_and_solve(*args):
        ctypes.CDLL(None).printf(b"a line of HiGHS\n")
        return solve(*args)

    monkeypatch.setattr(LinearProgram, "solve", print_and_solve)
    assert main(["autoshard", str(program), *MESH, "--network", "tpu-v5p", "--json", "--compare", "none"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["returned"] == "chosen" and "a line of HiGHS" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give --mesh x=4,y=2"),
        ((*MESH, "--fix", "w"), "give a path and a spec"),
        ((*MESH, "--fix", "v=P('x')"), "no argument or result"),
        ((*MESH, "--budget", "1"), "the smallest budget that works is"),
        ((*MESH, "-o", "/no/such/folder/x.mlir"), "cannot write /no/such/folder/x.mlir"),
        ((*MESH, "--svg", "/no/such/folder/x.svg"), "cannot write /no/such/folder/x.svg"),
    ],
)
def test_what_is_refused(call, program, options, words):
    code, _, err = call("autoshard", program, *options)
    assert code != 0 and words in err
