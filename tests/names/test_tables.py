"""The tables that come along, bit for bit against loaders written here in plain numpy, there and back."""

from __future__ import annotations

import time
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.types.view import View

HEADS, KV, DIM, MODEL, INNER, EXPERTS, VOCAB, LAYERS = 8, 4, 4, 16, 32, 4, 24, 3
Q_RANK, KV_RANK, ROPE, BLOCK, DENSE = 12, 8, 2, 4, 1
DEEPSEEK = {"q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_rope_head_dim": ROPE, "block": BLOCK}


def model(family, tied=False):
    """Arrays of a small model under Hugging Face's names, no two elements of an array alike."""
    shapes = {"model.embed_tokens.weight": (VOCAB, MODEL), "model.norm.weight": (MODEL,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, MODEL)
    for at in range(LAYERS):
        layer = f"model.layers.{at}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (MODEL,)
        shapes |= {f"{layer}{name}": shape for name, shape in layer_shapes(family, at)}
    rng = np.random.default_rng(7)
    return {name: rng.permutation(int(np.prod(shape))).reshape(shape) for name, shape in shapes.items()}


def layer_shapes(family, at):
    scales = family == "deepseek-v3"
    attention = {"o_proj": (MODEL, HEADS * DIM)}
    if scales:
        attention |= {"q_a_proj": (Q_RANK, MODEL), "kv_a_proj_with_mqa": (KV_RANK + ROPE, MODEL)}
        attention |= {"q_b_proj": (HEADS * (DIM + ROPE), Q_RANK), "kv_b_proj": (HEADS * 2 * DIM, KV_RANK)}
        yield "self_attn.q_a_layernorm.weight", (Q_RANK,)
        yield "self_attn.kv_a_layernorm.weight", (KV_RANK,)
    else:
        attention |= {f"{name}_proj": (n * DIM, MODEL) for name, n in (("q", HEADS), ("k", KV), ("v", KV))}
        yield from [(f"self_attn.{name}_proj.bias", (n * DIM,)) for name, n in (("q", HEADS), ("k", KV), ("v", KV))]
    if family.startswith("qwen3"):
        yield from [(f"self_attn.{name}_norm.weight", (DIM,)) for name in "qk"]
    matrices = {f"self_attn.{name}": shape for name, shape in attention.items()}
    gated = {"gate_proj": (INNER, MODEL), "up_proj": (INNER, MODEL), "down_proj": (MODEL, INNER)}
    if family in ("llama", "qwen3") or (scales and at < DENSE):
        matrices |= {f"mlp.{name}": shape for name, shape in gated.items()}
    else:
        home = "block_sparse_moe" if family == "mixtral" else "mlp"
        names = (
            dict(zip(gated, ("w1", "w3", "w2"), strict=True)) if family == "mixtral" else {name: name for name in gated}
        )
        yield f"{home}.gate.weight", (EXPERTS, MODEL)
        if scales:
            yield "mlp.gate.e_score_correction_bias", (EXPERTS,)
            matrices |= {f"mlp.shared_experts.{name}": shape for name, shape in gated.items()}
        for expert in range(EXPERTS):
            matrices |= {f"{home}.experts.{expert}.{names[name]}": shape for name, shape in gated.items()}
    for name, shape in matrices.items():
        yield f"{name}.weight", shape
        if scales:
            yield f"{name}.weight_scale_inv", tuple(-(-size // BLOCK) for size in shape)


def beside_ranks(tp, *arrays):
    """On each rank its share of each array, one below the other."""
    return np.concatenate([share for rank in range(tp) for share in (np.split(each, tp)[rank] for each in arrays)])


def vllm(arrays, tp, tied):
    """What vLLM's ranks hold, one after the other, as its loaders copy it."""
    made = {}
    stacked = {}
    for name, array in arrays.items():
        home, _, last = name.rpartition(".")
        if ".q_proj." in name:
            k, v = (arrays[name.replace(".q_proj.", f".{other}_proj.")] for other in "kv")
            rows = []
            for rank in range(tp):
                first = rank // (tp // KV) if tp > KV else rank * (KV // tp)
                heads = slice(first * DIM, (first + max(1, KV // tp)) * DIM)
                rows += [np.split(array, tp)[rank], k[heads], v[heads]]
            made[name.replace("q_proj", "qkv_proj")] = np.concatenate(rows)
        elif ".q_a_proj." in name:
            latent = arrays[name.replace("q_a_proj", "kv_a_proj_with_mqa")]
            made[name.replace("q_a_proj", "fused_qkv_a_proj")] = np.concatenate([array, latent])
        elif ".experts." in name:
            base, _, rest = name.partition(".experts.")
            expert, _, matrix = rest.rpartition(".")[0].partition(".")
            prefix = f"{base}.experts.routed_experts."
            if matrix in ("gate_proj", "w1"):
                other = arrays[f"{home.removesuffix(matrix)}{'up_proj' if matrix == 'gate_proj' else 'w3'}.{last}"]
                stacked.setdefault(f"{prefix}w13_{last}", {})[int(expert)] = beside_ranks(tp, array, other)
            elif matrix in ("down_proj", "w2"):
                stacked.setdefault(f"{prefix}w2_{last}", {})[int(expert)] = array
        elif ".gate_proj." in name:
            other = arrays[name.replace("gate_proj", "up_proj")]
            made[name.replace("gate_proj", "gate_up_proj")] = beside_ranks(tp, array, other)
        elif not any(f".{part}." in name for part in ("k_proj", "v_proj", "kv_a_proj_with_mqa", "up_proj")):
            made[name] = array
    if tied:
        made["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    return made | {name: np.stack([parts[at] for at in sorted(parts)]) for name, parts in stacked.items()}


def megatron(arrays, tp, tied, family):
    """What Megatron-Core's ranks hold, one after the other: groups of queries with their key and value."""
    plain = {"model.embed_tokens": "embedding.word_embeddings", "model.norm": "decoder.final_layernorm"}
    plain |= {"lm_head": "output_layer", "self_attn.o_proj": "self_attention.linear_proj"}
    plain |= {
        "down_proj": "linear_fc2",
        "w2": "linear_fc2",
        "mlp.gate": "mlp.router",
        "block_sparse_moe.gate": "mlp.router",
    }
    plain |= {"q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj", "kv_b_proj": "linear_kv_up_proj"}
    plain |= {"kv_a_proj_with_mqa": "linear_kv_down_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    made = {}
    for name, array in arrays.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        home, _, last = rest.rpartition(".")
        sparse = family in ("mixtral", "qwen3-moe") or (
            family == "deepseek-v3" and layer.isdigit() and int(layer) >= DENSE
        )
        if not name.startswith("model.layers."):
            made[f"{plain[name.removesuffix('.weight')]}.weight"] = array
            continue
        if home == "input_layernorm":
            to = "input_layernorm.weight" if family == "deepseek-v3" else "self_attention.linear_qkv.layer_norm_weight"
        elif home == "post_attention_layernorm":
            to = "pre_mlp_layernorm.weight" if sparse else "mlp.linear_fc1.layer_norm_weight"
        elif home.endswith("a_layernorm"):
            to = f"self_attention.linear_{'kv' if '.kv_' in home else 'q'}_up_proj.layer_norm_weight"
        elif last == "e_score_correction_bias":
            to = "mlp.router.expert_bias"
        elif home == "self_attn.q_proj":
            k, v = (arrays[name.replace(".q_proj.", f".{other}_proj.")] for other in "kv")
            groups = [each.reshape(KV, -1, DIM, *array.shape[1:]) for each in (array, k, v)]
            array = np.concatenate(groups, axis=1).reshape(-1, *array.shape[1:])
            to = f"self_attention.linear_qkv.{last}"
        elif home.endswith(("gate_proj", "w1")):
            array = beside_ranks(tp, array, arrays[name.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")])
            to = f"{home.removesuffix('gate_proj').removesuffix('w1')}linear_fc1.{last}"
        elif home.endswith(("k_proj", "v_proj", "up_proj", "w3")):
            continue
        else:
            key = home if home in plain else home.rpartition(".")[2]
            to = f"{(home.removesuffix(key) + plain[key]).replace('self_attn.', 'self_attention.')}.{last}"
        to = to.replace("block_sparse_moe", "mlp")
        if ".experts." in to:
            base, _, expert = to.partition(".experts.")
            number, _, matrix = expert.partition(".")
            to = f"{base}.experts.{matrix}{number}"
        made[f"decoder.layers.{layer}.{to}"] = array
    if tied:
        made["output_layer.weight"] = arrays["model.embed_tokens.weight"]
    return made


def apply_table(table, arrays, **sizes):
    """What a table makes of arrays, element by element, by the pairs of indices that its views relate."""
    shapes = {name: array.shape for name, array in arrays.items()}
    made = {name: np.full(shape, -1) for name, shape in table.target_shapes(shapes, **sizes).items()}
    for each in table.resolve(shapes, **sizes):
        source, target = index_pairs(each.view)
        made[each.target].flat[target] = arrays[each.source].flat[source]
    return made


def index_pairs(view: View):
    source, target = np.array([view.map.start]), np.array([view.map.end])
    for count, here, there in view.map.digits:
        source = (source[:, None] + np.arange(count) * here).ravel()
        target = (target[:, None] + np.arange(count) * there).ravel()
    return source, target


def assert_same_trees(made, wanted):
    assert made.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(made[name], array, err_msg=name)


def sizes_of(name, family, tp, tied):
    """The sizes of the small model that a table knows."""
    given = {"heads": HEADS, "kv_heads": KV, "tp": tp, "tied": int(tied)}
    if name.endswith("vllm") and family in ("mixtral", "qwen3-moe", "deepseek-v3"):
        given |= {"experts": EXPERTS}
    if family == "deepseek-v3":
        given |= DEEPSEEK if name.endswith("vllm") else {"dense_layers": DENSE}
    return given


FAMILIES = ("llama", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3")


def test_each_table_that_comes_along_is_tested():
    shipped = {file.name for file in (resources.files("reshard.names") / "tables").iterdir()}
    assert shipped == {f"{family}-to-{to}.toml" for family in FAMILIES for to in ("vllm", "megatron")}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["vllm", "megatron"])
def test_a_table_makes_what_a_loader_makes_and_back(to, family, tp, tied):
    arrays = model(family, tied)
    if to == "megatron":
        arrays = {name: array for name, array in arrays.items() if not name.endswith("scale_inv")}
    table = rs.names.read(f"{family}-to-{to}")
    sizes = sizes_of(table.name, family, tp, tied)
    wanted = vllm(arrays, tp, tied) if to == "vllm" else megatron(arrays, tp, tied, family)
    made = apply_table(table, arrays, **sizes)
    assert_same_trees(made, wanted)
    assert_same_trees(apply_table(table.inverse(), made, **sizes), arrays)


def spread(arrays, mesh, axis):
    """Layouts that cut each array's first dim, if it divides, and the tiles of them."""
    layouts = {}
    tiles = {}
    for name, array in arrays.items():
        cut = array.shape[0] % mesh.size == 0
        spec = [[axis] if cut and at == 0 else [] for at in range(array.ndim)]
        layouts[name] = rs.Layout.from_spec(mesh, array.shape, "int64", spec)
        parts = np.split(array, mesh.size) if cut else [array] * mesh.size
        tiles[name] = dict(zip(mesh.devices, parts, strict=True))
    return layouts, tiles


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["vllm", "megatron"])
def test_one_plan_moves_a_model_to_its_server_and_back(to, family):
    """From two trainers to the four ranks of a server whose tiles are what each rank loads."""
    arrays = {name: array for name, array in model(family).items() if ".layers.1." in name or "layers" not in name}
    arrays = {name: array for name, array in arrays.items() if to == "vllm" or not name.endswith("scale_inv")}
    table = rs.names.read(f"{family}-to-{to}")
    sizes = sizes_of(table.name, family, 4, False)
    wanted = vllm(arrays, 4, False) if to == "vllm" else megatron(arrays, 4, False, family)
    trainer = spread(arrays, rs.Mesh({"x": 2}, device_ids=[1, 0]), "x")
    server = spread(wanted, rs.Mesh({"t": 4}, device_ids=[4, 5, 6, 1]), "t")
    for way, (layouts, tiles), (onto, expected) in ((table, trainer, server), (table.inverse(), server, trainer)):
        moves, sources, targets = way.moves(layouts, onto, **sizes)
        tree = rs.plan_tree(moves, sources=sources, targets=targets)
        made = rs.simulate(tree, tiles)
        assert made.keys() == expected.keys()
        for name, each in expected.items():
            for device, tile in each.items():
                np.testing.assert_array_equal(made[name][device], tile, err_msg=f"{name} on {device}")


def test_names_of_experts_before_the_runner_was_nested():
    arrays = model("mixtral")
    table = rs.names.read("mixtral-to-vllm")
    sizes = sizes_of(table.name, "mixtral", 2, False)
    wanted = {name.replace("routed_experts.", ""): array for name, array in vllm(arrays, 2, False).items()}
    assert_same_trees(apply_table(table, arrays, flat=1, **sizes), wanted)


def test_scaled_blocks_stay_with_their_scales():
    """Unscaled and then fused is fused and then unscaled, by 4 x 4 blocks."""
    arrays = model("deepseek-v3")
    sizes = sizes_of("vllm", "deepseek-v3", 2, False)
    made = apply_table(rs.names.read("deepseek-v3-to-vllm"), arrays, **sizes)

    def scale(tree):
        return {
            name: array
            * tree[f"{name}_scale_inv"].repeat(BLOCK, -1).repeat(BLOCK, -2)[..., : array.shape[-2], : array.shape[-1]]
            for name, array in tree.items()
            if f"{name}_scale_inv" in tree
        }

    plain = scale(arrays)
    wanted = {
        name: array for name, array in vllm(plain | {"lm_head.weight": 0}, 2, False).items() if name in scale(made)
    }
    assert len(wanted) > 5
    assert_same_trees(scale(made), wanted)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_parts_beside_each_other_are_concatenated(data):
    """Parts of any sizes on any number of ranks, stacked or transposed, whose order in the table is any."""
    draw = data.draw
    ranks, rows, experts, across = (draw(st.integers(1, 3)) for _ in range(4))
    counts = {name: draw(st.integers(1, 3)) for name in draw(st.permutations("abcd"))[: draw(st.integers(2, 4))]}
    turned = draw(st.booleans())
    stack = draw(st.sampled_from(["", "first", "last"]))
    right = {"": "{}", "first": "e {}", "last": "{} e"}[stack].format("m (t h d)" if turned else "(t h d) m")
    beside = ", ".join(f"{name} = {count}" for name, count in counts.items())
    text = f"""
[[rule]]
source = "{{{",".join(sorted(counts))}}}.{{e}}"
target = "fused{"" if stack else ".{e}"}"
view = "(t h d) m -> {right}"
sizes = {{ t = "ranks", h = {{ {beside} }}{", e = 'experts'" if stack else ""} }}
"""
    rng = np.random.default_rng(0)
    arrays = {
        f"{name}.{at}": rng.permutation(ranks * count * rows * across).reshape(-1, across)
        for name, count in counts.items()
        for at in range(experts)
    }
    each = [beside_ranks(ranks, *(arrays[f"{name}.{at}"] for name in counts)) for at in range(experts)]
    each = [array.T if turned else array for array in each]
    wanted = {"fused": np.stack(each, axis=-1 if stack == "last" else 0)} if stack else {}
    wanted |= {} if stack else {f"fused.{at}": array for at, array in enumerate(each)}
    sizes = {"ranks": ranks} | ({"experts": experts} if stack else {})
    table = rs.names.read(text)
    made = apply_table(table, arrays, **sizes)
    assert_same_trees(made, wanted)
    assert_same_trees(apply_table(table.inverse(), made, **sizes), arrays)


LANES = """
extends = "llama-to-vllm"

[[rule]]
source = "model.layers.{l}.mlp.{gate,up}_proj.weight"
target = "model.layers.{l}.mlp.gate_up_proj.weight"
view = "(blocks two lanes) m -> (blocks two lanes) m"
sizes = { two = { gate = 1, up = 1 }, lanes = 128 }
"""


def test_gate_and_up_take_turns_by_128_lanes():
    gate, up = np.arange(512 * 3).reshape(512, 3), -np.arange(512 * 3).reshape(512, 3) - 1
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    arrays = dict(zip(names, (gate, up), strict=True))
    wanted = np.stack([gate.reshape(4, 128, 3), up.reshape(4, 128, 3)], axis=1).reshape(1024, 3)
    table = rs.names.read(LANES)
    made = apply_table(table, arrays)
    assert_same_trees(made, {"model.layers.0.mlp.gate_up_proj.weight": wanted})
    assert_same_trees(apply_table(table.inverse(), made), arrays)


def published(layers=61, experts=256):
    """The names and shapes of DeepSeek-V3 as it is published."""
    both = ("weight", "weight_scale_inv")

    def matrix(name, rows, columns):
        yield f"{name}.{both[0]}", (rows, columns)
        yield f"{name}.{both[1]}", (-(-rows // 128), -(-columns // 128))

    yield from [("model.embed_tokens.weight", (129280, 7168)), ("model.norm.weight", (7168,))]
    yield "lm_head.weight", (129280, 7168)
    for at in range(layers):
        layer = f"model.layers.{at}."
        yield from [(f"{layer}{norm}_layernorm.weight", (7168,)) for norm in ("input", "post_attention")]
        yield from [(f"{layer}self_attn.{n}_a_layernorm.weight", (rank,)) for n, rank in (("q", 1536), ("kv", 512))]
        for name, rows, columns in (
            ("q_a_proj", 1536, 7168),
            ("q_b_proj", 24576, 1536),
            ("kv_a_proj_with_mqa", 576, 7168),
            ("kv_b_proj", 32768, 512),
            ("o_proj", 7168, 16384),
        ):
            yield from matrix(f"{layer}self_attn.{name}", rows, columns)
        homes = ["mlp"] if at < 3 else ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(experts))]
        inner = 18432 if at < 3 else 2048
        for home in homes:
            for name in ("gate_proj", "up_proj"):
                yield from matrix(f"{layer}{home}.{name}", inner, 7168)
            yield from matrix(f"{layer}{home}.down_proj", 7168, inner)
        if at >= 3:
            yield from [
                (f"{layer}mlp.gate.weight", (experts, 7168)),
                (f"{layer}mlp.gate.e_score_correction_bias", (experts,)),
            ]


def test_deepseek_v3_as_published_resolves_quickly():
    shapes = dict(published())
    assert len(shapes) == 90_427  # 61 layers, 58 of them with 256 experts of three matrices and their scales
    start = time.perf_counter()
    named = rs.names.read("deepseek-v3-to-vllm").resolve(shapes, tp=8, expert_tp=1, experts=256)
    assert time.perf_counter() - start < 20  # a tenth of it on an idle core
    assert len(named) == len(shapes)
    filled = {each.target: each.view.target_shape for each in named}
    assert filled["model.layers.60.mlp.experts.routed_experts.w13_weight"] == (256, 4096, 7168)
    assert filled["model.layers.60.mlp.experts.routed_experts.w2_weight_scale_inv"] == (256, 56, 16)
    assert filled["model.layers.0.self_attn.fused_qkv_a_proj.weight_scale_inv"] == (17, 56)
