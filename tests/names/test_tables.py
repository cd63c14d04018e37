"""The tables that come along, bit for bit against loaders written here in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

import reshard as rs

HEADS, KV, DIM, MODEL, INNER = 8, 2, 4, 16, 24


def filled(table, arrays, **sizes):
    """What a table makes of arrays, by the index maps of its views alone."""
    shapes = {name: array.shape for name, array in arrays.items()}
    made = {name: np.zeros(shape, np.int64) - 1 for name, shape in table.target_shapes(shapes, **sizes).items()}
    for each in table.resolve(shapes, **sizes):
        source = np.array([each.view.map.start])
        target = np.array([each.view.map.end])
        for count, here, there in each.view.map.digits:
            source = (source[:, None] + np.arange(count) * here).ravel()
            target = (target[:, None] + np.arange(count) * there).ravel()
        made[each.target].flat[target] = arrays[each.source].flat[source]
    return made


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_llama_as_vllm_loads_it(tp):
    rng = np.random.default_rng(tp)
    q, k, v = (rng.integers(0, 1 << 40, (heads * DIM, MODEL)) for heads in (HEADS, KV, KV))
    gate, up = (rng.integers(0, 1 << 40, (INNER, MODEL)) for _ in range(2))
    layer = "model.layers.3."
    arrays = {f"{layer}self_attn.{name}_proj.weight": a for name, a in (("q", q), ("k", k), ("v", v))}
    arrays |= {f"{layer}mlp.{name}_proj.weight": a for name, a in (("gate", gate), ("up", up))}
    rows = []
    for rank in range(tp):
        own = KV // tp if tp <= KV else 1
        first = rank * KV // tp
        kv = slice(first * DIM, (first + own) * DIM)
        rows += [np.split(q, tp)[rank], k[kv], v[kv]]
    halves = [half for rank in range(tp) for half in (np.split(gate, tp)[rank], np.split(up, tp)[rank])]
    wanted = {f"{layer}self_attn.qkv_proj.weight": rows, f"{layer}mlp.gate_up_proj.weight": halves}
    table = rs.names.read("llama-to-vllm")
    sizes = {"heads": HEADS, "kv_heads": KV, "tp": tp}
    made = filled(table, arrays, **sizes)
    assert made.keys() == wanted.keys()
    for name, parts in wanted.items():
        np.testing.assert_array_equal(made[name], np.concatenate(parts))
    back = filled(table.inverse(), made, **sizes)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
