"""Flax models of transformers, with the usual rules of partition by the names of weights."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.real_programs.base import Case, P, Scale, program, shaped, sharded_like, shardings_of

LLAMA = (
    ("embed_tokens", P("model", "data")), ("[qkv]_proj", P("data", "model")), ("o_proj", P("model", "data")),
    ("gate_proj|up_proj", P("data", "model")), ("down_proj", P("model", "data")), ("lm_head", P("data", "model")),
)  # fmt: skip
GPT2 = (
    ("wte", P("model", "data")), ("c_attn.*kernel", P("model", "data")), ("attn.*c_proj.*kernel", P("data", "model")),
    ("c_fc.*kernel", P("model", "data")), ("mlp.*c_proj.*kernel", P("data", "model")),
)  # fmt: skip
BERT = (
    ("word_embeddings", P("model", None)), ("(query|key|value).*kernel", P(None, "model")),
    ("attention.*output.*dense.*kernel", P("model", None)), ("intermediate.*kernel", P(None, "model")),
    ("output.*dense.*kernel", P("model", None)),
)  # fmt: skip


def by_name(rules: tuple[tuple[str, Any], ...]) -> Any:
    """The rule of the first pattern that is in a weight's path."""

    def rule(path: str, _: Any) -> Any:
        return next((spec for pattern, spec in rules if re.search(pattern, path)), P())

    return rule


def trained(model: Any, rules: Any, scale: Scale, batch: int, length: int, adam: bool) -> Case:
    """A training step of a model of transformers."""
    import optax

    mesh = scale.mesh(data=2, model=4)
    shapes = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 8)))
    params = sharded_like(shapes, by_name(rules), mesh)
    optimizer = optax.adamw(1e-3) if adam else optax.sgd(1e-3)
    state = sharded_like(jax.eval_shape(optimizer.init, shapes), by_name(rules), mesh)
    tokens = shaped(mesh, P("data", None), (batch, length), jnp.int32)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model(tokens, params=params, train=False).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, after = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), after, value

    out = (shardings_of(params), shardings_of(state), NamedSharding(mesh, P()))
    return Case(step, (params, state, tokens), {"out_shardings": out}, 99)


@program("transformers")
def flax_llama(scale: Scale) -> Case:
    """FlaxLlamaForCausalLM, a training step with SGD."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    width = scale.pick(128, 1024)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=scale.pick(64, 512),
    )  # fmt: skip
    model = FlaxLlamaForCausalLM(config, _do_init=False)
    return trained(model, LLAMA, scale, scale.pick(8, 16), scale.pick(32, 512), False)


@program("transformers")
def flax_gpt2(scale: Scale) -> Case:
    """FlaxGPT2LMHeadModel, a training step with AdamW."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    width = scale.pick(128, 1024)
    config = GPT2Config(vocab_size=512, n_embd=width, n_layer=2, n_head=8, n_positions=scale.pick(64, 512))
    model = FlaxGPT2LMHeadModel(config, _do_init=False)
    return trained(model, GPT2, scale, scale.pick(8, 16), scale.pick(32, 512), True)


@program("transformers")
def flax_bert(scale: Scale) -> Case:
    """FlaxBertForMaskedLM, a training step with AdamW."""
    from transformers import BertConfig, FlaxBertForMaskedLM

    width = scale.pick(128, 1024)
    config = BertConfig(
        vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2, num_attention_heads=8,
        max_position_embeddings=scale.pick(64, 512),
    )  # fmt: skip
    model = FlaxBertForMaskedLM(config, _do_init=False)
    return trained(model, BERT, scale, scale.pick(8, 16), scale.pick(32, 512), True)


@program("transformers")
def flax_llama_generate(scale: Scale) -> Case:
    """FlaxLlamaForCausalLM, one step of generation with its cache, sampled."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    mesh = scale.mesh(data=2, model=4)
    width, length, batch = scale.pick(128, 1024), scale.pick(32, 512), scale.pick(8, 16)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=length,
    )  # fmt: skip
    model = FlaxLlamaForCausalLM(config, _do_init=False)
    shapes = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 8)))
    params = sharded_like(shapes, by_name(LLAMA), mesh)
    cache = jax.eval_shape(lambda params: model.init_cache(batch, length), shapes)

    def kept(path: str, leaf: Any) -> Any:
        return P("data", None, "model", None) if leaf.ndim == 4 else P()

    cache = sharded_like(cache, kept, mesh)
    token = shaped(mesh, P("data", None), (batch, 1), jnp.int32)
    at = shaped(mesh, P("data", None), (batch, 1), jnp.int32)

    def one_token(params: Any, cache: Any, token: Any, at: Any) -> Any:
        mask = jnp.ones((batch, length), jnp.int32)
        made = model(token, params=params, past_key_values=cache, attention_mask=mask, position_ids=at)
        best, which = jax.lax.top_k(made.logits[:, -1].astype(jnp.float32), 16)
        drawn = jax.random.categorical(jax.random.key(1), best)
        return jnp.take_along_axis(which, drawn[:, None], 1), made.past_key_values

    options = {"out_shardings": (token.sharding, shardings_of(cache)), "donate_argnums": 1}
    return Case(one_token, (params, cache, token, at), options, 3)
