"""Models and losses as their libraries ship them: their own classes, split by the rules that users start with.

The batch is split over `data`. Weights are split over their largest dim or by name, and optimizer states like them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks.real_programs.base import (
    Case,
    P,
    Scale,
    divisible,
    fsdp,
    program,
    shaped,
    sharded_like,
    shardings_of,
)
from benchmarks.real_programs.transformers_models import LLAMA, by_name


def train(loss: Callable[..., Any], weights: Any, batch: tuple[Any, ...], mesh: Mesh, highest: int = 7) -> Case:
    """A step of AdamW, whose moments are split as the weights are: `loss(weights, *batch)`."""
    import optax

    optimizer = optax.adamw(1e-3)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    by_path = {path: one.sharding for path, one in jax.tree_util.tree_leaves_with_path(weights)}
    whole = NamedSharding(mesh, P())

    def like_weights(path: Any, leaf: Any) -> Any:
        found = (sharding for ours, sharding in by_path.items() if ours and path[-len(ours) :] == ours)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=next(found, whole))

    kept = jax.tree_util.tree_map_with_path(like_weights, jax.eval_shape(optimizer.init, shapes))

    def step(weights: Any, kept: Any, *batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, *batch)
        updates, after = optimizer.update(gradient, kept, weights)
        return optax.apply_updates(weights, updates), after, value

    options = {"out_shardings": (shardings_of(weights), shardings_of(kept), whole), "donate_argnums": (0, 1)}
    return Case(step, (weights, kept, *batch), options, highest)


def _labels(logits: Any, labels: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _weights_of(model: Any, rule: Any, mesh: Mesh) -> Any:
    """The weights of a Flax model of transformers."""
    return sharded_like(jax.eval_shape(lambda: model.init_weights(jax.random.key(0), model.input_shape)), rule, mesh)


@program("transformers")
def flax_vit(scale: Scale) -> Case:
    """FlaxViTForImageClassification, a training step with FSDP."""
    from transformers import FlaxViTForImageClassification, ViTConfig

    mesh, width, n = scale.mesh(data=8), scale.pick(64, 1024), scale.pick(32, 224)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=8, intermediate_size=4 * width, image_size=n,
        patch_size=scale.pick(8, 16), num_labels=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = FlaxViTForImageClassification(config, _do_init=False)
    weights = _weights_of(model, fsdp("data"), mesh)
    images = shaped(mesh, P("data"), (scale.pick(16, 64), 3, n, n))
    labels = shaped(mesh, P("data"), images.shape[:1], jnp.int32)
    return train(lambda w, x, y: _labels(model(x, params=w).logits, y), weights, (images, labels), mesh, 15)


@program("transformers")
def flax_clip(scale: Scale) -> Case:
    """FlaxCLIPModel, a training step with the contrastive loss of the whole batch."""
    from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig, FlaxCLIPModel

    mesh, width, n = scale.mesh(data=2, model=4), scale.pick(64, 512), scale.pick(32, 224)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2, "num_attention_heads": 8}
    text = CLIPTextConfig(vocab_size=512, max_position_embeddings=32, eos_token_id=511, **sizes)
    vision = CLIPVisionConfig(image_size=n, patch_size=scale.pick(8, 16), **sizes)
    model = FlaxCLIPModel(CLIPConfig.from_text_vision_configs(text, vision, projection_dim=width), _do_init=False)
    rules = (
        ("token_embedding", P("model", None)), ("[qkv]_proj.*kernel", P(None, "model")),
        ("out_proj.*kernel", P("model", None)), ("fc1.*kernel", P(None, "model")), ("fc2.*kernel", P("model", None)),
        ("projection.*kernel", P(None, "model")),
    )  # fmt: skip
    weights = _weights_of(model, by_name(rules), mesh)
    batch = scale.pick(16, 64)
    tokens = shaped(mesh, P("data"), (batch, 16), jnp.int32)
    images = shaped(mesh, P("data"), (batch, 3, n, n))

    def loss(weights: Any, tokens: Any, images: Any) -> Any:
        made = model(tokens, images, params=weights)
        right = jnp.arange(batch)
        return (_labels(made.logits_per_text, right) + _labels(made.logits_per_image, right)) / 2

    return train(loss, weights, (tokens, images), mesh, 511)


@program("transformers")
def flax_bart(scale: Scale) -> Case:
    """FlaxBartForConditionalGeneration, encoder and decoder, a training step with FSDP and tensor parallelism."""
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    mesh, width, length = scale.mesh(data=2, model=4), scale.pick(64, 768), scale.pick(32, 256)
    config = BartConfig(
        vocab_size=512, d_model=width, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, encoder_attention_heads=8, decoder_attention_heads=8, max_position_embeddings=length,
        dropout=0.0,
    )  # fmt: skip
    model = FlaxBartForConditionalGeneration(config, _do_init=False)
    rules = (
        ("shared", P("model", "data")), ("[qkv]_proj.*kernel", P("data", "model")),
        ("out_proj.*kernel", P("model", "data")), ("fc1.*kernel", P("data", "model")),
        ("fc2.*kernel", P("model", "data")),
    )  # fmt: skip
    weights = _weights_of(model, by_name(rules), mesh)
    tokens = shaped(mesh, P("data"), (scale.pick(8, 32), length), jnp.int32)

    def loss(weights: Any, tokens: Any, labels: Any) -> Any:
        shifted = jnp.pad(labels, ((0, 0), (1, 0)))[:, :-1]
        return _labels(model(tokens, decoder_input_ids=shifted, params=weights).logits, labels)

    return train(loss, weights, (tokens, tokens), mesh, 511)


@program("transformers")
def flax_whisper(scale: Scale) -> Case:
    """FlaxWhisperForConditionalGeneration: speech to text, a training step with ZeRO over all devices."""
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    mesh, width, frames = scale.mesh(data=8), scale.pick(64, 512), scale.pick(64, 1024)
    config = WhisperConfig(
        vocab_size=512, num_mel_bins=16, d_model=width, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = FlaxWhisperForConditionalGeneration(config, _do_init=False)
    weights = _weights_of(model, fsdp("data"), mesh)
    sound = shaped(mesh, P("data"), (scale.pick(8, 32), 16, frames))
    labels = shaped(mesh, P("data"), (sound.shape[0], 16), jnp.int32)

    def loss(weights: Any, sound: Any, labels: Any) -> Any:
        return _labels(model(sound, jnp.roll(labels, 1, 1), params=weights).logits, labels)

    return train(loss, weights, (sound, labels), mesh, 511)


@program("transformers")
def flax_mistral(scale: Scale) -> Case:
    """FlaxMistralForCausalLM with grouped queries and a sliding window, a training step."""
    from transformers import FlaxMistralForCausalLM, MistralConfig

    mesh, width, length = scale.mesh(data=2, model=4), scale.pick(128, 1024), scale.pick(32, 512)
    config = MistralConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=length, sliding_window=16,
    )  # fmt: skip
    model = FlaxMistralForCausalLM(config, _do_init=False)
    weights = _weights_of(model, by_name(LLAMA), mesh)
    tokens = shaped(mesh, P("data"), (scale.pick(8, 16), length), jnp.int32)

    def loss(weights: Any, tokens: Any) -> Any:
        return _labels(model(tokens, params=weights).logits[:, :-1], tokens[:, 1:])

    return train(loss, weights, (tokens,), mesh, 511)


def _train_nnx(build: Callable[[], Any], mesh: Mesh, batch: int, length: int, positions: bool = True) -> Case:
    """A model of tunix with the shardings that it brings itself."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(build))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(state))

    def split(leaf: Any, spec: Any) -> Any:
        part = divisible(spec if isinstance(spec, P) else P(), leaf.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, part))

    weights = jax.tree.map(split, nnx.to_pure_dict(state), specs)
    tokens = shaped(mesh, P("fsdp", None), (batch, length), jnp.int32)
    mask = jnp.tril(jnp.ones((batch, length, length), bool))

    def loss(weights: Any, tokens: Any) -> Any:
        filled = jax.tree.map(lambda one: one, state)
        nnx.replace_by_pure_dict(filled, weights)
        with mesh:
            logits, _ = nnx.merge(graph, filled)(tokens, jnp.arange(length)[None].repeat(batch, 0), None, mask)
        return _labels(logits[:, :-1], tokens[:, 1:])

    return train(loss, weights, (tokens,), mesh, 500)


@program("tunix")
def tunix_gemma(scale: Scale) -> Case:
    """tunix's Gemma 2: soft caps, a sliding window and activations split by width between layers."""
    from flax import nnx
    from tunix.models.gemma import model as gemma

    width = scale.pick(64, 1024)
    config = gemma.ModelConfig(
        num_layers=2, num_embed=512, embed_dim=width, hidden_dim=4 * width, num_heads=8, head_dim=scale.pick(16, 128),
        num_kv_heads=4, final_logit_softcap=30.0, attn_logits_soft_cap=50.0, use_post_attn_norm=True,
        use_post_ffw_norm=True, sliding_window_size=16,
        attention_types=(gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
    )  # fmt: skip
    mesh = scale.mesh(fsdp=2, tp=4)
    return _train_nnx(lambda: gemma.Gemma(config, rngs=nnx.Rngs(0)), mesh, scale.pick(8, 16), scale.pick(32, 512))


@program("tunix")
def tunix_llama3(scale: Scale) -> Case:
    """tunix's Llama 3 with tied embeddings."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    width = scale.pick(64, 1024)
    config = llama3.ModelConfig(
        num_layers=2, vocab_size=512, embed_dim=width, hidden_dim=4 * width, num_heads=8, head_dim=scale.pick(16, 128),
        num_kv_heads=4, rope_theta=500_000, norm_eps=1e-5, weight_tying=True,
    )  # fmt: skip
    mesh = scale.mesh(fsdp=2, tp=4)
    return _train_nnx(lambda: llama3.Llama3(config, rngs=nnx.Rngs(0)), mesh, scale.pick(8, 16), scale.pick(32, 512))


@program("penzai")
def penzai_llama(scale: Scale) -> Case:
    """penzai's Llama-like transformer of named axes, a training step with FSDP."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llamalike

    mesh, width = scale.mesh(data=8), scale.pick(64, 1024)
    config = llamalike.LlamalikeTransformerConfig(
        num_kv_heads=4, query_head_multiplier=2, embedding_dim=width, projection_dim=width // 8,
        mlp_hidden_dim=4 * width, num_decoder_blocks=2, vocab_size=512, mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )  # fmt: skip

    def build() -> Any:
        model = llamalike.build_llamalike_transformer(config, jax.random.key(0))
        return pz.unbind_params(model, freeze=True)

    model, params = build()
    leaves, tree = jax.tree.flatten(params)
    weights = sharded_like({str(at): leaf for at, leaf in enumerate(leaves)}, fsdp("data"), mesh)
    tokens = shaped(mesh, P("data"), (scale.pick(8, 16), scale.pick(32, 512)), jnp.int32)

    def loss(weights: Any, tokens: Any) -> Any:
        bound = pz.bind_variables(model, jax.tree.unflatten(tree, [weights[str(at)] for at in range(len(leaves))]))
        logits = bound(pz.nx.wrap(tokens).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")
        return _labels(logits[:, :-1], tokens[:, 1:])

    return train(loss, weights, (tokens,), mesh, 511)


def _train_keras(model: Any, mesh: Mesh, images: Any, highest: int) -> Case:
    """A model of keras by its stateless call: trainable weights by FSDP, the others whole."""
    like = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in model.trainable_variables]
    others = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in model.non_trainable_variables]
    weights = sharded_like(like, fsdp("data"), mesh)
    others = sharded_like(others, lambda path, leaf: P(), mesh)
    labels = shaped(mesh, P("data"), images.shape[:1], jnp.int32)

    def loss(weights: Any, others: Any, x: Any, y: Any) -> Any:
        logits, _ = model.stateless_call(weights, others, x, training=True)
        return _labels(logits, y)

    return train(loss, weights, (others, images, labels), mesh, highest)


@program("keras")
def keras_mobilenet(scale: Scale) -> Case:
    """keras.applications' MobileNetV2, batch normalization over all devices, a training step with FSDP."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    mesh, n = scale.mesh(data=8), scale.pick(32, 224)
    model = keras.applications.MobileNetV2((n, n, 3), alpha=0.35, weights=None, classes=16, classifier_activation=None)
    return _train_keras(model, mesh, shaped(mesh, P("data"), (scale.pick(8, 64), n, n, 3)), 15)


@program("keras")
def keras_convnext(scale: Scale) -> Case:
    """keras.applications' ConvNeXt, images split by rows too, a training step."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    from keras.src.applications.convnext import ConvNeXt

    mesh, n, width = scale.mesh(data=2, rows=4), scale.pick(64, 256), scale.pick(8, 64)
    model = ConvNeXt(
        depths=[1, 1, 2, 1], projection_dims=[width, 2 * width, 4 * width, 8 * width], drop_path_rate=0.0,
        include_preprocessing=False, weights=None, input_shape=(n, n, 3), classes=16, classifier_activation=None,
    )  # fmt: skip
    keras.utils.clear_session()
    return _train_keras(model, mesh, shaped(mesh, P("data", "rows"), (scale.pick(4, 16), n, n, 3)), 15)


@program("brax")
def brax_ppo(scale: Scale) -> Case:
    """brax's loss of PPO with its networks: environments split over all devices, a training step."""
    from brax.training import types
    from brax.training.agents.ppo import losses, networks

    mesh, batch, turns = scale.mesh(data=8), scale.pick(32, 2048), scale.pick(8, 32)
    network = networks.make_ppo_networks(24, 8, value_hidden_layer_sizes=(scale.pick(64, 256),) * 3)

    def build(key: Any) -> Any:
        return losses.PPONetworkParams(policy=network.policy_network.init(key), value=network.value_network.init(key))

    weights = sharded_like(jax.eval_shape(build, jax.random.key(0)), fsdp("data"), mesh)

    def of_time(*shape: int) -> Any:
        return shaped(mesh, P("data"), (batch, turns, *shape))

    data = types.Transition(
        observation=of_time(24), action=of_time(8), reward=of_time(), discount=of_time(), next_observation=of_time(24),
        extras={"state_extras": {"truncation": of_time()},
                "policy_extras": {"raw_action": of_time(8), "log_prob": of_time(), "distribution_params": of_time(16)}},
    )  # fmt: skip

    def loss(weights: Any, data: Any) -> Any:
        return losses.compute_ppo_loss(weights, None, data, jax.random.key(1), network)[0]

    return train(loss, weights, (data,), mesh)


@program("mctx")
def mctx_muzero(scale: Scale) -> Case:
    """mctx's search of MuZero: roots split over all devices, a small network split by its width."""
    import mctx

    mesh, batch, width, actions = scale.mesh(data=2, model=4), scale.pick(16, 512), scale.pick(32, 256), 8
    weights = {
        "first": shaped(mesh, P(None, "model"), (width + actions, 4 * width)),
        "second": shaped(mesh, P("model", None), (4 * width, width)),
        "logits": shaped(mesh, P(), (width, actions)),
        "value": shaped(mesh, P(), (width,)),
    }
    root = shaped(mesh, P("data"), (batch, width))

    def act(w: Any, root: Any) -> Any:
        def recurrent(w: Any, _: Any, action: Any, state: Any) -> Any:
            both = jnp.concatenate([state, jax.nn.one_hot(action, actions)], -1)
            state = jnp.tanh(jax.nn.relu(both @ w["first"]) @ w["second"])
            value, still = state @ w["value"], jnp.full(batch, 0.99)
            logits = state @ w["logits"]
            return mctx.RecurrentFnOutput(reward=value, discount=still, prior_logits=logits, value=value), state

        made = mctx.RootFnOutput(prior_logits=root @ w["logits"], value=root @ w["value"], embedding=root)
        found = mctx.muzero_policy(w, jax.random.key(0), made, recurrent, num_simulations=8)
        return found.action, found.action_weights

    return Case(act, (weights, root))


@program("evojax")
def evojax_waterworld(scale: Scale) -> Case:
    """evojax's water world with its MLP policy: a population split over all devices, eight turns and an update."""
    from evojax.policy.mlp import MLPPolicy
    from evojax.task.waterworld import WaterWorld

    mesh, people = scale.mesh(data=8), scale.pick(16, 1024)
    task = WaterWorld()
    policy = MLPPolicy(task.obs_shape[0], [32, 32], task.act_shape[0])
    noise = shaped(mesh, P("data"), (people, policy.num_params))
    center = shaped(mesh, P(), (policy.num_params,))

    def run(center: Any, noise: Any) -> Any:
        state = task.reset(jax.random.split(jax.random.PRNGKey(0), people))
        kept = policy.reset(state)

        def turn(both: Any, _: Any) -> Any:
            state, kept = both
            action, kept = policy.get_actions(state, center + 0.1 * noise, kept)
            state, reward, _ = task.step(state, action)
            return (state, kept), reward

        score = jnp.sum(jax.lax.scan(turn, (state, kept), None, length=8)[1], 0)
        return center + 0.1 * (score - score.mean()) @ noise / people

    return Case(run, (center, noise))


@program("optax")
def optax_ctc(scale: Scale) -> Case:
    """optax's CTC loss on a recurrent-free acoustic model: long sequences split over devices, a training step."""
    import optax

    mesh, width, length = scale.mesh(data=2, model=4), scale.pick(64, 512), scale.pick(64, 512)
    weights = {
        "in": shaped(mesh, P("data", "model"), (width, 4 * width)),
        "out": shaped(mesh, P("model", "data"), (4 * width, 32)),
    }
    batch = scale.pick(8, 64)
    sound = shaped(mesh, P("data", "model"), (batch, length, width))
    padding = shaped(mesh, P("data", "model"), (batch, length))
    labels = shaped(mesh, P("data"), (batch, 16), jnp.int32)

    def loss(w: Any, sound: Any, padding: Any, labels: Any) -> Any:
        logits = jax.nn.gelu(sound @ w["in"]) @ w["out"]
        return optax.ctc_loss(logits, (padding > 1).astype(logits.dtype), labels, jnp.zeros(labels.shape)).mean()

    return train(loss, weights, (sound, padding, labels), mesh, 31)


@program("qwix")
def qwix_lora(scale: Scale) -> Case:
    """Low-rank adapters of qwix on a network of flax's linen: weights are frozen and split, adapters trained."""
    import qwix
    from flax import linen as nn

    mesh, width = scale.mesh(data=2, model=4), scale.pick(128, 2048)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = x + nn.Dense(width, use_bias=False)(nn.gelu(nn.Dense(4 * width, use_bias=False)(x)))
            return x

    model = qwix.apply_lora_to_model(Model(), qwix.LoraProvider(module_path=".*", rank=16, alpha=16.0))
    x = shaped(mesh, P("data", None), (scale.pick(64, 1024), width))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))["params"]
    weights = sharded_like(shapes, fsdp(("data", "model")), mesh)
    leaves, tree = jax.tree_util.tree_flatten_with_path(weights)
    lora = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if "lora" in jax.tree_util.keystr(path)}
    frozen = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if "lora" not in jax.tree_util.keystr(path)}

    def loss(lora: Any, frozen: Any, x: Any) -> Any:
        both = {**lora, **frozen}
        params = jax.tree.unflatten(tree, [both[jax.tree_util.keystr(path)] for path, _ in leaves])
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    return train(loss, lora, (frozen, x), mesh)
