"""The corpus under plain `jax.jit`: each program computes on its mesh what it computes on one device, and in numpy."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.programs import BY_NAME, PROGRAMS, Case, Program
from tests.jax.programs.base import assert_same
from tests.sampling import sampled_by_name

COLLECTIVE = re.compile(r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(-start)?\(")
WARNING = "Involuntary full rematerialization"


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def compiled(case: Case) -> Any:
    return case.jitted().lower(*case.args).compile()


def alone(program: Program) -> Any:
    """What the program computes on a mesh of one device."""
    mesh = program.make_mesh_of_one()
    with program.entered(mesh):
        case = program.build(mesh)
        return to_numpy(compiled(case)(*case.traced_args))


@pytest.mark.parametrize("program", sampled_by_name(PROGRAMS, "jax-21562", "no-reshard"))
def test_distributed_is_undistributed(program: Program, capfd: pytest.CaptureFixture[str]):
    mesh = program.make_mesh()
    with program.entered(mesh):
        case = program.build(mesh)
        before = to_numpy(case.args)  # the call may donate them
        executable = compiled(case)
        warned = WARNING in capfd.readouterr().err
        got = to_numpy(executable(*case.traced_args))
    assert_same(got, alone(program), case.tolerance)
    if case.reference:
        want = jax.tree.leaves(case.reference(*before))
        want = [np.asarray(b, a.dtype) for a, b in zip(jax.tree.leaves(got), want, strict=True)]
        assert_same(got, jax.tree.unflatten(jax.tree.structure(got), want), case.tolerance)
    assert warned == program.remat
    assert bool(COLLECTIVE.search(executable.as_text())) == program.moves


@pytest.mark.slow
def test_the_training_step_learns():
    program = BY_NAME["transformer-train"]
    mesh = program.make_mesh()
    case = program.build(mesh)
    state, tokens = case.args
    step, losses = case.jitted(), []
    for _ in range(5):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert int(state["step"]) == 5


@pytest.mark.slow
def test_decoding_is_prefill():
    """Decoding step by step gives the same as one causal pass over prompt and outputs."""
    program = BY_NAME["kv-cache"]
    mesh = program.make_mesh()
    case = program.build(mesh)
    w, prompt, _ = to_numpy(case.args)
    ys, (keys, values) = to_numpy(case.jitted()(*case.args))
    fed = ys[:-1, :, 0].swapaxes(0, 1)  # the first decoded input is the prefill's last output, recomputed below
    for rounds in range(ys.shape[0]):
        last = np.concatenate([causal(w, prompt)[:, -1:], fed], axis=1)[:, : rounds + 1]
        np.testing.assert_allclose(
            causal(w, np.concatenate([prompt, last], axis=1))[:, -1], ys[rounds, :, 0], atol=1e-4
        )
    inputs = np.concatenate([prompt, last], axis=1)
    for kept, c in ((keys, 1), (values, 2)):
        np.testing.assert_allclose(kept, np.einsum("bsd,dhk->bshk", inputs, w[:, c]), atol=1e-4)


def causal(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Causal attention in numpy."""
    q, k, v = np.einsum("bsd,dchk->cbshk", x, w)
    scores = np.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqt,bthk->bqhk", weights / weights.sum(-1, keepdims=True), v).reshape(x.shape)


@pytest.mark.slow
def test_experts_are_their_einsum():
    """Each token within its expert's capacity goes through that expert, whatever the dispatch."""
    program = BY_NAME["moe-einsum"]
    mesh = program.make_mesh_of_one()
    case = program.build(mesh)
    params, x = to_numpy(case.args)
    gates = np.exp(x @ params["router"])
    gates /= gates.sum(-1, keepdims=True)
    want = np.zeros_like(x)
    for group in range(x.shape[0]):
        used = np.zeros(gates.shape[-1], int)
        for token, gate in enumerate(gates[group]):
            expert = gate.argmax()
            if used[expert] < 6:
                h = np.maximum(x[group, token] @ params["up"][expert], 0)
                want[group, token] = gate[expert] * (h @ params["down"][expert])
            used[expert] += 1
    (_, got), _ = case.jitted()(*case.args)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_corpus():
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names)) == len(BY_NAME) >= 60
    assert sum("https://" in program.about for program in PROGRAMS) >= 30
    assert sum(program.remat for program in PROGRAMS) >= 15
    assert {program.device_count for program in PROGRAMS} == {4, 6, 8}
    assert sum(program.explicit for program in PROGRAMS) >= 4 and sum(program.ambient for program in PROGRAMS) >= 4
    assert [program.name for program in PROGRAMS if not program.moves] == ["no-reshard"]
    for program in PROGRAMS:
        assert program.about and "\n" not in program.about


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.float32([1, 2]), "b": np.int32([3, 5])},  # an integer
        {"a": np.float32([1, 2.001]), "b": np.int32([3, 4])},  # a value
        {"a": np.float32([1, np.nan]), "b": np.int32([3, 4])},
        {"a": np.float64([1, 2]), "b": np.int32([3, 4])},  # a dtype
        {"a": np.float32([[1, 2]]), "b": np.int32([3, 4])},  # a shape
        {"a": np.float32([1, 2])},  # the structure
    ],
)
def test_what_differs_is_seen(other: Any):
    tree = {"a": np.float32([1, 2]), "b": np.int32([3, 4])}
    assert_same(tree, {"a": np.float32([1, 2.00001]), "b": np.int32([3, 4])}, 1e-5)
    with pytest.raises(AssertionError):
        assert_same(other, tree, 1e-5)


def test_bfloat16_and_complex_are_compared_as_numbers():
    assert_same(jnp.bfloat16([1.0]), jnp.bfloat16([1.0]), 0)
    with pytest.raises(AssertionError):
        assert_same(jnp.bfloat16([1.0]), jnp.bfloat16([1.0078125]), 1e-3)
    with pytest.raises(AssertionError):
        assert_same(np.complex64([1 + 1j]), np.complex64([1 - 1j]), 1e-3)


def test_too_few_devices_say_what_to_set():
    with pytest.raises(RuntimeError, match=r"'many' needs 4096 devices .*XLA_FLAGS"):
        Program("many", "", {"x": 4096}, lambda mesh: Case(jnp.sin, ())).make_mesh()
