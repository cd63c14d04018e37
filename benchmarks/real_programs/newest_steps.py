"""Steps that were written last, each measured once.

Optimal transport, a Gaussian process, an evolution strategy, a normalizing flow, Markov chains, a text-to-text model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.real_programs.base import Case, P, Scale, fsdp, program, shape_key, shaped, sharded_like
from benchmarks.real_programs.shipped_models import train
from benchmarks.real_programs.training_steps import finish_case

NEWEST = ("ott_generator", "tinygp_adam", "evosax_policy", "flowjax_coupling", "blackjax_rows", "flax_bart")
"""Six steps of six libraries."""


@program("ott")
def ott_generator(scale: Scale) -> Case:
    """ott: a generator learns to match a cloud of points, by the Sinkhorn divergence and Adam."""
    import optax
    from ott.tools import sinkhorn_divergence

    mesh, points, width = scale.mesh(data=8), scale.pick(128, 4096), scale.pick(64, 1024)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, width), (width, width), (width, 32))]
    weights = sharded_like(shapes, lambda path, leaf: P(), mesh)
    optimizer = optax.adam(1e-3)
    kept = sharded_like(jax.eval_shape(optimizer.init, shapes), lambda path, leaf: P(), mesh)
    noise, cloud = shaped(mesh, P("data", None), (points, 16)), shaped(mesh, P("data", None), (points, 32))

    def step(weights: Any, kept: Any, noise: Any, cloud: Any) -> Any:
        def loss(weights: Any) -> Any:
            made = jnp.tanh(jnp.tanh(noise @ weights[0]) @ weights[1]) @ weights[2]
            return sinkhorn_divergence.sinkdiv(made, cloud, epsilon=0.5, solve_kwargs={"max_iterations": 50})[0]

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept)
        return optax.apply_updates(weights, updates), after, value

    return finish_case(step, weights, kept, (noise, cloud), mesh)


@program("tinygp")
def tinygp_adam(scale: Scale) -> Case:
    """tinygp: the gradient of a Gaussian process's likelihood by its kernel, and a step of Adam."""
    import optax
    import tinygp

    mesh, rows = scale.mesh(data=8), scale.pick(256, 8192)
    x, y = shaped(mesh, P("data", None), (rows, 4)), shaped(mesh, P("data"), (rows,))
    names = ("amplitude", "scale", "noise", "mean")
    weights = {name: shaped(mesh, P(), ()) for name in names}
    optimizer = optax.adam(1e-2)
    kept = sharded_like(jax.eval_shape(optimizer.init, weights), lambda path, leaf: P(), mesh)

    def step(weights: Any, kept: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            kernel = jnp.exp(w["amplitude"]) * tinygp.kernels.Matern32(jnp.exp(w["scale"]), tinygp.kernels.L2Distance())
            gp = tinygp.GaussianProcess(kernel, x, diag=0.1 + jnp.exp(w["noise"]), mean=w["mean"])
            return -gp.log_probability(y)

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept)
        return optax.apply_updates(weights, updates), after, value

    return finish_case(step, weights, kept, (x, y), mesh)


@program("evosax")
def evosax_policy(scale: Scale) -> Case:
    """evosax: a generation of OpenAI's evolution strategy, whose members are networks that balance poles.

    Some members' rewards are equal but for their last digits, and ranks decide: in f32 results of two right programs
    differ by 2.5e-2, in f64 by 1e-16.
    """
    import optax
    from evosax.algorithms import Open_ES

    mesh, members, hidden, poles = scale.mesh(pop=8), scale.pick(64, 1024), scale.pick(32, 256), 16
    solution = {"one": jnp.zeros((4, hidden)), "two": jnp.zeros((hidden, hidden)), "out": jnp.zeros((hidden, 1))}
    strategy = Open_ES(members, solution, optimizer=optax.adam(1e-2))
    settings = strategy.default_params
    made = strategy.init(jax.random.key(0), solution, settings)
    state = sharded_like(jax.eval_shape(lambda: made), lambda path, leaf: P(), mesh)

    def play(network: Any, start: Any) -> Any:
        def move(at: Any, _: None) -> Any:
            force = jnp.tanh(jnp.tanh(jnp.tanh(at @ network["one"]) @ network["two"]) @ network["out"])[:, 0]
            place, speed, angle, turn = at.T
            turning = 9.8 * jnp.sin(angle) - force * jnp.cos(angle)
            after = jnp.stack(
                [place + 0.02 * speed, speed + 0.02 * force, angle + 0.02 * turn, turn + 0.02 * turning], 1
            )
            return after, -jnp.cos(angle)

        return jax.lax.scan(move, start, None, length=20)[1].mean()

    def generation(state: Any, starts: Any, key: Any) -> Any:
        one, two = jax.random.split(key)
        population, state = strategy.ask(one, state, settings)
        fitness = jax.vmap(play, (0, None))(population, starts)
        state, _ = strategy.tell(two, population, fitness, state, settings)
        return state, fitness.mean()

    starts = shaped(mesh, P(), (poles, 4))
    return Case(generation, (state, starts, shape_key(mesh)), {"donate_argnums": 0})


@program("flowjax")
def flowjax_coupling(scale: Scale) -> Case:
    """flowjax: maximum likelihood of a coupling flow of eight scanned layers, with AdamW."""
    import equinox as eqx
    import paramax
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow
    from flowjax.train.losses import MaximumLikelihoodLoss

    mesh, dims, width = scale.mesh(data=2, model=4), scale.pick(16, 64), scale.pick(64, 1024)
    flow = coupling_flow(jax.random.key(0), base_dist=Normal(jnp.zeros(dims)), nn_width=width, nn_depth=2)
    made, static = eqx.partition(
        flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable)
    )
    weights = sharded_like(jax.eval_shape(lambda: made), fsdp("model"), mesh)
    x = shaped(mesh, P("data", None), (scale.pick(64, 8192), dims))

    def loss(weights: Any, x: Any) -> Any:
        return MaximumLikelihoodLoss()(weights, static, x)

    return train(loss, weights, (x,), mesh)


@program("blackjax")
def blackjax_rows(scale: Scale) -> Case:
    """blackjax: a step of Hamiltonian Monte Carlo in eight chains, of a logistic regression with many rows."""
    import blackjax

    mesh, rows, features, chains = scale.mesh(data=8), scale.pick(512, 1 << 17), scale.pick(32, 256), 8
    x, y = shaped(mesh, P("data", None), (rows, features)), shaped(mesh, P("data"), (rows,))
    place = {"weights": jax.ShapeDtypeStruct((chains, features), jnp.float32),
             "bias": jax.ShapeDtypeStruct((chains,), jnp.float32)}  # fmt: skip

    def chance(place: Any, x: Any, y: Any) -> Any:
        logits = x @ place["weights"] + place["bias"]
        prior = -0.5 * (jnp.sum(place["weights"] ** 2) + place["bias"] ** 2)
        return prior - jnp.sum(jax.nn.softplus(jnp.where(y > 0, -logits, logits)))

    def start(place: Any, x: Any, y: Any) -> Any:
        return jax.vmap(lambda one: blackjax.hmc.init(one, lambda at: chance(at, x, y)))(place)

    state = sharded_like(jax.eval_shape(start, place, x, y), lambda path, leaf: P(), mesh)

    def step(state: Any, x: Any, y: Any, key: Any) -> Any:
        sampler = blackjax.hmc(lambda at: chance(at, x, y), 1e-3, jnp.ones(features + 1), 4)
        state, info = jax.vmap(sampler.step)(jax.random.split(key, chains), state)
        return state, info.acceptance_rate.mean()

    return Case(step, (state, x, y, shape_key(mesh)), {"donate_argnums": 0})


@program("transformers")
def flax_bart(scale: Scale) -> Case:
    """FlaxBartForConditionalGeneration: encoder and decoder learn from pairs of texts, with AdamW."""
    import optax
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    mesh, width = scale.mesh(data=2, model=4), scale.pick(64, 1024)
    config = BartConfig(
        vocab_size=512, d_model=width, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, max_position_embeddings=512,
    )  # fmt: skip
    model = FlaxBartForConditionalGeneration(config, _do_init=False)
    weights = sharded_like(jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 8))), fsdp("model"), mesh)
    batch = scale.pick(8, 32)
    source, target = (shaped(mesh, P("data", None), (batch, scale.pick(n, 8 * n)), jnp.int32) for n in (32, 16))

    def loss(weights: Any, source: Any, target: Any) -> Any:
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        logits = model(source, decoder_input_ids=shifted, params=weights, train=False).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    return train(loss, weights, (source, target), mesh, 511)
