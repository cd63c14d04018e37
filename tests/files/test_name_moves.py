"""Loads by tables of names: what is made of a checkpoint's tensors, and one error with all names that do not fit."""

from __future__ import annotations

import re

import pytest

import reshard as rs
from reshard.errors import FileError, MissingTensorError, PlanError
from reshard.files.plan_load import list_target_types, name_moves
from reshard.plans.stored import Checkpoint, Stored, StoredPiece
from reshard.types.layout import Layout

SIZES = {"heads": 8, "kv_heads": 4, "tp": 2}
LAYER = "model.layers.0."


def stored_model(**dtypes: str) -> Checkpoint:
    shapes = {f"self_attn.{one}_proj.weight": (rows, 16) for one, rows in (("q", 64), ("k", 32), ("v", 32))}
    shapes |= {"mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16), "input_layernorm.weight": (16,)}
    tensors: dict[str, Stored] = {}
    for name, shape in shapes.items():
        dtype = dtypes.get(name.split(".")[1].split("_")[0], "float32")
        piece = StoredPiece(tuple((0, size) for size in shape), 0, 0, 4)
        tensors[LAYER + name] = Stored(LAYER + name, dtype, shape, (piece,))
    return Checkpoint("model/", "safetensors", (), tensors)


def layouts_of(ckpt: Checkpoint, *left_out: str) -> dict[str, Layout]:
    mesh = rs.Mesh(tp=2)
    made = list_target_types(ckpt, "llama-to-vllm", SIZES)
    return {
        name: Layout.from_spec(mesh, shape, dtype, [["tp"], []][: len(shape)])
        for name, (shape, dtype) in made.items()
        if not name.endswith(left_out or ("none",))
    }


def test_moves_of_a_table() -> None:
    ckpt = stored_model(gate="bfloat16", up="bfloat16")
    assert list_target_types(ckpt)[LAYER + "mlp.up_proj.weight"] == ((24, 16), "bfloat16")
    targets = layouts_of(ckpt)
    fused = LAYER + "mlp.gate_up_proj.weight"
    assert (targets[fused].shape, targets[fused].dtype) == ((48, 16), "bfloat16")
    moves, sources, fills = name_moves(ckpt, targets, "llama-to-vllm", SIZES)
    qkv = LAYER + "self_attn.qkv_proj.weight"
    assert [sources[name] for name in moves if fills[name] == qkv] == [
        f"{LAYER}self_attn.{one}_proj.weight" for one in "qkv"
    ]
    assert all(moves[name].source == ckpt[sources[name]].as_stored for name in moves)
    assert not any(move.cast for move in moves.values())
    wide = {name: Layout.from_spec(layout.mesh, layout.shape, "float32", []) for name, layout in targets.items()}
    moves, _, _ = name_moves(ckpt, wide, "llama-to-vllm", SIZES)
    assert [name.rpartition(".mlp.")[2] for name, move in moves.items() if move.cast] == [
        "gate_proj.weight",
        "up_proj.weight",
    ]


def test_one_error_has_all_names() -> None:
    ckpt = stored_model()
    targets = layouts_of(ckpt, "qkv_proj.weight", "layernorm.weight")
    other = {"model.norm.weight": targets[LAYER + "mlp.gate_up_proj.weight"]}
    with pytest.raises(MissingTensorError) as caught:
        name_moves(ckpt, targets | other, "llama-to-vllm", SIZES)
    for name in ("model.norm.weight", "self_attn.qkv_proj.weight", "input_layernorm.weight", 'rest="skip"'):
        assert name in str(caught.value)
    moves, _, fills = name_moves(ckpt, targets, "llama-to-vllm", SIZES, rest="skip")
    assert set(fills.values()) == set(targets) and len(moves) == 2
    small = Layout.from_spec(rs.Mesh(tp=2), (46, 16), "float32", [["tp"], []])
    with pytest.raises(FileError, match=re.escape("(46, 16), and the tensors fill (48, 16)")):
        name_moves(ckpt, {LAYER + "mlp.gate_up_proj.weight": small}, "llama-to-vllm", SIZES, rest="skip")


def test_tensors_without_a_rule() -> None:
    ckpt = stored_model()
    odd = {name: Stored(name, "float32", (4,), (StoredPiece(((0, 4),), 0, 0, 16),)) for name in ("ema.a", "ema.b")}
    more = Checkpoint("model/", "safetensors", (), {**ckpt.tensors, **odd})
    with pytest.raises(MissingTensorError, match=r"no rule for 'ema\.a', 'ema\.b'"):
        name_moves(more, layouts_of(ckpt), "llama-to-vllm", SIZES)
    assert name_moves(more, layouts_of(ckpt), "llama-to-vllm", SIZES, rest="skip") == name_moves(
        ckpt, layouts_of(ckpt), "llama-to-vllm", SIZES
    )
    with pytest.raises(PlanError, match=r"^'model/': .*heads"):
        name_moves(ckpt, layouts_of(ckpt), "llama-to-vllm", {"tp": 2})
