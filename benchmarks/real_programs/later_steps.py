"""Steps written after the choice of layouts was developed, as users of their libraries write them.

Transformers of images, experts, adapters, diffusion, two networks against each other, a recurrent network, Bayesian
inference, a sparse solver, a quantum circuit, attention on a graph, distillation, generation in a loop.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.real_programs.base import (
    Case,
    P,
    Scale,
    constrain,
    fsdp,
    program,
    shaped,
    sharded_like,
)
from benchmarks.real_programs.shipped_models import train
from benchmarks.real_programs.training_steps import LlamaSizes, finish_case
from benchmarks.real_programs.transformers_models import BERT, by_name

LATER = (
    "equinox_vit", "nnx_experts", "nnx_lora", "linen_unet", "haiku_gan", "haiku_lstm", "numpyro_svi", "sparse_cg",
    "quantum_circuit", "jraph_attention", "flax_distillation", "decode_loop", "optax_galore",
)  # fmt: skip
"""Thirteen steps of nine libraries."""


@program("equinox")
def equinox_vit(scale: Scale) -> Case:
    """equinox: a vision transformer with patches by a convolution and a class token, with Lion."""
    import equinox as eqx
    import optax

    mesh, width, size = scale.mesh(data=2, model=4), scale.pick(64, 1024), scale.pick(16, 128)

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norms: list[eqx.nn.LayerNorm]
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            one, two, three = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(8, width, key=one)
            self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
            self.up = eqx.nn.Linear(width, 4 * width, key=two)
            self.down = eqx.nn.Linear(4 * width, width, key=three)

        def __call__(self, x: Any) -> Any:
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h)
            h = jax.vmap(self.norms[1])(x)
            return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(h)))

    class Vision(eqx.Module):
        patches: eqx.nn.Conv2d
        positions: jax.Array
        token: jax.Array
        layers: list[Layer]
        head: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            one, two, three, *keys = jax.random.split(key, 5)
            self.patches = eqx.nn.Conv2d(3, width, 4, 4, key=one)
            self.positions = jax.random.normal(two, ((size // 4) ** 2 + 1, width))
            self.token = jnp.zeros((1, width))
            self.layers = [Layer(each) for each in keys]
            self.head = eqx.nn.Linear(width, 64, key=three)

        def __call__(self, image: Any) -> Any:
            x = self.patches(image).reshape(width, -1).T
            x = jnp.concatenate([self.token, x]) + self.positions
            for layer in self.layers:
                x = layer(x)
            return self.head(x[0])

    made = eqx.filter_eval_shape(Vision, jax.random.key(0))
    shapes, static = eqx.partition(made, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    optimizer = optax.lion(1e-4)
    weights = sharded_like(shapes, fsdp("model"), mesh)
    kept = sharded_like(jax.eval_shape(optimizer.init, shapes), fsdp("model"), mesh)
    images = shaped(mesh, P(("data", "model")), (scale.pick(16, 64), 3, size, size))
    labels = shaped(mesh, P(("data", "model")), images.shape[:1], jnp.int32)

    def step(weights: Any, kept: Any, images: Any, labels: Any) -> Any:
        def loss(weights: Any) -> Any:
            logits = jax.vmap(eqx.combine(weights, static))(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradient = eqx.filter_value_and_grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept, weights)
        return eqx.apply_updates(weights, updates), after, value

    return finish_case(step, weights, kept, (images, labels), mesh, 63)


@program("flax")
def nnx_experts(scale: Scale) -> Case:
    """flax.nnx: a mixture of eight experts of which each token takes two, with capacities, dispatched by einsum."""
    from flax import nnx

    mesh, width, experts = scale.mesh(data=2, model=4), scale.pick(64, 1024), 8

    class Experts(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            made = nnx.initializers.lecun_normal()
            self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
            self.up = nnx.Param(made(rngs.params(), (experts, width, 2 * width)))
            self.down = nnx.Param(made(rngs.params(), (experts, 2 * width, width)))
            self.norm = nnx.RMSNorm(width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            tokens = self.norm(x)
            capacity = 2 * 2 * tokens.shape[1] // experts
            chances = jax.nn.softmax(self.router(tokens))
            weights, chosen = jax.lax.top_k(chances, 2)
            picked = jax.nn.one_hot(chosen, experts)
            place = jnp.cumsum(picked.reshape(len(x), -1, experts), 1).reshape(picked.shape) - 1
            picked = picked * (place < capacity)
            slots = jax.nn.one_hot(place.astype(jnp.int32), capacity) * picked[..., None]
            dispatch, combine = slots.sum(2), jnp.einsum("gtk,gtkec->gtec", weights, slots)
            sent = constrain(jnp.einsum("gtec,gtd->egcd", dispatch, tokens), mesh, "model", "data")
            h = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", sent, self.up[...]))
            back = constrain(jnp.einsum("egcf,efd->egcd", h, self.down[...]), mesh, "model", "data")
            return x + jnp.einsum("gtec,egcd->gtd", combine, back)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([Experts(rngs) for _ in range(2)])

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def rule(path: str, leaf: Any) -> Any:
        return P("model") if leaf.ndim == 3 else P()

    weights = sharded_like(nnx.to_pure_dict(state), rule, mesh)
    x = shaped(mesh, P("data", None, None), (scale.pick(8, 32), scale.pick(32, 512), width))

    def loss(weights: Any, x: Any) -> Any:
        filled = jax.tree.map(lambda one: one, state)
        nnx.replace_by_pure_dict(filled, weights)
        return jnp.mean(nnx.merge(graph, filled)(x) ** 2)

    return train(loss, weights, (x,), mesh)


@program("flax")
def nnx_lora(scale: Scale) -> Case:
    """flax.nnx: LoRA adapters of rank 8 on frozen layers of attention and MLPs, which alone are trained."""
    import optax
    from flax import nnx

    mesh, width, heads = scale.mesh(data=2, model=4), scale.pick(128, 2048), 8

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.qkv = nnx.LoRALinear(width, 3 * width, lora_rank=8, use_bias=False, rngs=rngs)
            self.out = nnx.LoRALinear(width, width, lora_rank=8, use_bias=False, rngs=rngs)
            self.up = nnx.LoRALinear(width, 4 * width, lora_rank=8, use_bias=False, rngs=rngs)
            self.down = nnx.LoRALinear(4 * width, width, lora_rank=8, use_bias=False, rngs=rngs)
            self.norm = nnx.LayerNorm(width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(*x.shape[:2], heads, -1), 3, -1)
            x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
            return constrain(x + self.down(nnx.silu(self.up(x))), mesh, "data", None, None)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(512, width, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])

        def __call__(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.embedding.attend(x)

    graph, adapters, rest = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.LoRAParam, ...)
    frozen = sharded_like(nnx.to_pure_dict(rest), fsdp("model"), mesh)
    weights = sharded_like(nnx.to_pure_dict(adapters), lambda path, leaf: P(), mesh)
    optimizer = optax.adamw(1e-4)
    kept = sharded_like(jax.eval_shape(optimizer.init, weights), lambda path, leaf: P(), mesh)
    tokens = shaped(mesh, P("data", None), (scale.pick(8, 16), scale.pick(32, 512)), jnp.int32)

    def step(weights: Any, kept: Any, frozen: Any, tokens: Any) -> Any:
        def loss(weights: Any) -> Any:
            filled = [jax.tree.map(lambda one: one, state) for state in (adapters, rest)]
            for state, pure in zip(filled, (weights, frozen), strict=True):
                nnx.replace_by_pure_dict(state, pure)
            logits = nnx.merge(graph, *filled)(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept, weights)
        return optax.apply_updates(weights, updates), after, value

    return finish_case(step, weights, kept, (frozen, tokens), mesh, 511)


@program("flax")
def linen_unet(scale: Scale) -> Case:
    """flax.linen: a denoising U-Net with time embeddings and attention in its middle, a step of DDPM with Adam."""
    from flax import linen as nn

    mesh, c, size = scale.mesh(data=8), scale.pick(16, 128), scale.pick(16, 64)

    class Block(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x: Any, time: Any) -> Any:
            h = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
            h = h + nn.Dense(self.features)(nn.silu(time))[:, None, None]
            h = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(4)(h)))
            return h + (x if x.shape[-1] == self.features else nn.Dense(self.features)(x))

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any, time: Any) -> Any:
            waves = time[:, None] * jnp.exp(-jnp.arange(c // 2) * 0.5)
            time = nn.Dense(4 * c)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1))
            x = nn.Conv(c, (3, 3))(x)
            kept = []
            for level in (1, 2):
                x = Block(level * c)(x, time)
                kept.append(x)
                x = nn.avg_pool(x, (2, 2), (2, 2))
            x = Block(2 * c)(x, time)
            tokens = nn.LayerNorm()(x).reshape(len(x), -1, x.shape[-1])
            x = x + nn.MultiHeadDotProductAttention(4)(tokens, tokens).reshape(x.shape)
            for level in (2, 1):
                x = jax.image.resize(x, (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
                x = Block(level * c)(jnp.concatenate([x, kept.pop()], -1), time)
            return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))

    model = UNet()
    images = shaped(mesh, P("data"), (scale.pick(16, 64), size, size, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, size, size, 3)), jnp.zeros(2))
    weights = sharded_like(shapes, fsdp("data"), mesh)
    key = jax.ShapeDtypeStruct((), jax.eval_shape(lambda: jax.random.key(0)).dtype, sharding=NamedSharding(mesh, P()))

    def loss(weights: Any, images: Any, key: Any) -> Any:
        one, two = jax.random.split(key)
        time = jax.random.uniform(one, (len(images),))
        noise = jax.random.normal(two, images.shape)
        share = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
        noisy = share * images + jnp.sqrt(1 - share**2) * noise
        return jnp.mean((model.apply(weights, noisy, time) - noise) ** 2)

    return train(loss, weights, (images, key), mesh)


@program("haiku")
def haiku_gan(scale: Scale) -> Case:
    """haiku: a generator of transposed convolutions against a critic, both updated in one step of Adam."""
    import haiku as hk
    import optax

    mesh, c = scale.mesh(data=2, model=4), scale.pick(16, 128)

    def generate(z: Any) -> Any:
        x = hk.Linear(4 * 4 * 4 * c)(z).reshape(-1, 4, 4, 4 * c)
        for channels in (2 * c, c):
            x = jax.nn.relu(hk.LayerNorm(-1, True, True)(hk.Conv2DTranspose(channels, 4, 2)(x)))
        return jnp.tanh(hk.Conv2D(3, 3)(x))

    def criticize(x: Any) -> Any:
        for channels in (c, 2 * c, 4 * c):
            x = jax.nn.leaky_relu(hk.Conv2D(channels, 4, 2)(x))
        return hk.Linear(1)(x.reshape(len(x), -1))[:, 0]

    generator, critic = (hk.without_apply_rng(hk.transform(f)) for f in (generate, criticize))
    batch = scale.pick(32, 256)
    images = shaped(mesh, P(("data", "model")), (batch, 16, 16, 3))
    noise = shaped(mesh, P(("data", "model")), (batch, 64))
    optimizer = optax.adam(2e-4, b1=0.5)
    shapes = {
        "generator": jax.eval_shape(generator.init, jax.random.key(0), jnp.zeros((1, 64))),
        "critic": jax.eval_shape(critic.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3))),
    }
    weights = sharded_like(shapes, fsdp("data"), mesh)
    kept = sharded_like(jax.eval_shape(lambda w: jax.tree.map(optimizer.init, w, is_leaf=lambda x: "critic" not in x),
                                       shapes), fsdp("data"), mesh)  # fmt: skip

    def step(weights: Any, kept: Any, images: Any, noise: Any) -> Any:
        def judge(w: Any) -> Any:
            fake = jax.lax.stop_gradient(generator.apply(weights["generator"], noise))
            real, made = critic.apply(w, images), critic.apply(w, fake)
            return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(made))

        def fool(w: Any) -> Any:
            return jnp.mean(jax.nn.softplus(-critic.apply(weights["critic"], generator.apply(w, noise))))

        after, states, values = {}, {}, []
        for name, loss in (("critic", judge), ("generator", fool)):
            value, gradient = jax.value_and_grad(loss)(weights[name])
            updates, states[name] = optimizer.update(gradient, kept[name])
            after[name] = optax.apply_updates(weights[name], updates)
            values.append(value)
        return after, states, sum(values)

    return finish_case(step, weights, kept, (images, noise), mesh)


@program("haiku")
def haiku_lstm(scale: Scale) -> Case:
    """haiku: two layers of LSTM over sequences of characters, unrolled by a scan, clipped, with RMSProp."""
    import haiku as hk
    import optax

    mesh, width, letters = scale.mesh(data=2, model=4), scale.pick(128, 2048), 128

    def network(tokens: Any) -> Any:
        core = hk.DeepRNN([hk.Embed(letters, width), hk.LSTM(width), jax.nn.relu, hk.LSTM(width), hk.Linear(letters)])
        logits, _ = hk.dynamic_unroll(core, tokens, core.initial_state(tokens.shape[1]))
        return logits

    model = hk.without_apply_rng(hk.transform(network))
    tokens = shaped(mesh, P(None, "data"), (scale.pick(16, 128), scale.pick(16, 256)), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(tokens.shape, jnp.int32))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-3))
    weights = sharded_like(shapes, fsdp("model"), mesh)
    kept = sharded_like(jax.eval_shape(optimizer.init, shapes), fsdp("model"), mesh)

    def step(weights: Any, kept: Any, tokens: Any) -> Any:
        def loss(weights: Any) -> Any:
            logits = model.apply(weights, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:]).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept)
        return optax.apply_updates(weights, updates), after, value

    return finish_case(step, weights, kept, (tokens,), mesh, letters - 1)


@program("numpyro")
def numpyro_svi(scale: Scale) -> Case:
    """numpyro: an update of variational inference for a Bayesian network with a normal guide by mean field."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    mesh, rows, d, h = scale.mesh(data=8), scale.pick(256, 16384), scale.pick(32, 256), scale.pick(64, 1024)
    x = shaped(mesh, P("data", None), (rows, d))
    y = shaped(mesh, P("data"), (rows,))

    def model(x: Any, y: Any) -> None:
        one = numpyro.sample("one", dist.Normal(0, 1).expand([d, h]).to_event(2))
        two = numpyro.sample("two", dist.Normal(0, 1).expand([h, h]).to_event(2))
        out = numpyro.sample("out", dist.Normal(0, 1).expand([h]).to_event(1))
        noise = numpyro.sample("noise", dist.Gamma(3.0, 1.0))
        mean = jnp.tanh(jnp.tanh(x @ one) @ two) @ out
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(mean, noise), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-3), Trace_ELBO(num_particles=2))
    # What a guide is made of does not depend on how many rows there are.
    made = svi.init(jax.random.key(0), jnp.zeros((1, d)), jnp.zeros(1))
    state = sharded_like(jax.eval_shape(lambda: made), lambda path, leaf: P(), mesh)

    def update(state: Any, x: Any, y: Any) -> Any:
        return svi.update(state, x, y)

    return Case(update, (state, x, y), {"donate_argnums": 0})


@program("jax")
def sparse_cg(scale: Scale) -> Case:
    """jax.experimental.sparse: conjugate gradients on a sparse matrix in coordinates, as of finite elements."""
    from jax.experimental import sparse

    mesh, n = scale.mesh(x=8), scale.pick(1024, 1 << 20)
    count = 8 * n
    data, b = shaped(mesh, P("x"), (count,)), shaped(mesh, P("x"), (n,))
    at = shaped(mesh, P("x", None), (count, 2), jnp.int32)

    def solve(data: Any, at: Any, b: Any) -> Any:
        matrix = sparse.BCOO((data, at), shape=(n, n))

        def apply(x: Any) -> Any:
            return 10 * x + matrix @ x + matrix.T @ x

        return jax.scipy.sparse.linalg.cg(apply, b, maxiter=10)[0]

    return Case(solve, (data, at, b), {"out_shardings": b.sharding}, n - 1)


@program("jax")
def quantum_circuit(scale: Scale) -> Case:
    """A simulator of quantum circuits: the gradient of an energy by angles of rotations, its state split by qubits."""
    mesh, qubits = scale.mesh(a=2, b=2, c=2), scale.pick(12, 20)
    angles = shaped(mesh, P(), (3, qubits))
    field = shaped(mesh, P(), (qubits,))

    def rotate(state: Any, angle: Any, qubit: int) -> Any:
        cos, sin = jnp.cos(angle / 2), jnp.sin(angle / 2)
        gate = jnp.array([[cos, -sin], [sin, cos]], jnp.complex64)
        return jnp.moveaxis(jnp.tensordot(gate, state, ((1,), (qubit,))), 0, qubit)

    def entangle(state: Any, one: int, other: int) -> Any:
        phase = jnp.array([[1, 1], [1, -1]], jnp.complex64)
        shape = [2 if dim in (one, other) else 1 for dim in range(qubits)]
        return state * phase.reshape(shape)

    def energy(angles: Any, field: Any) -> Any:
        state = jnp.zeros((2,) * qubits, jnp.complex64).at[(0,) * qubits].set(1)
        for layer in range(3):
            for qubit in range(qubits):
                state = rotate(state, angles[layer, qubit], qubit)
            for qubit in range(layer % 2, qubits - 1, 2):
                state = entangle(state, qubit, qubit + 1)
            state = constrain(state, mesh, "a", "b", "c")
        chances = jnp.abs(state) ** 2
        total = 0.0
        for qubit in range(qubits):
            others = tuple(dim for dim in range(qubits) if dim != qubit)
            total += field[qubit] * (chances.sum(others) * jnp.array([1.0, -1.0])).sum()
        return total

    return Case(jax.value_and_grad(energy), (angles, field))


@program("jraph")
def jraph_attention(scale: Scale) -> Case:
    """jraph: two layers of graph attention with eight heads, a training step on the nodes of one graph."""
    import jraph

    mesh, heads = scale.mesh(data=8), 8
    nodes, edges, width = scale.pick(256, 32768), scale.pick(1024, 262144), scale.pick(32, 256)
    shapes = {
        f"{name}{layer}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for layer in range(2)
        for name, shape in (("query", (width, heads, width)), ("score", (heads, 2 * width)),
                            ("out", (heads * width, width)))
    }  # fmt: skip
    weights = sharded_like(shapes, lambda path, leaf: P(), mesh)
    x = shaped(mesh, P("data", None), (nodes, width))
    ends = [shaped(mesh, P("data"), (edges,), jnp.int32) for _ in range(2)]
    labels = shaped(mesh, P("data"), (nodes,), jnp.int32)

    def loss(w: Any, x: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        graph = jraph.GraphsTuple(x, None, receivers, senders, None, jnp.array([nodes]), jnp.array([edges]))
        for layer in range(2):
            graph = jraph.GAT(
                lambda nodes, at=layer: jnp.einsum("nd,dhf->nhf", nodes, w[f"query{at}"]),
                lambda sent, received, _, at=layer: jax.nn.leaky_relu(
                    jnp.einsum("ehf,hf->eh", jnp.concatenate([sent, received], -1), w[f"score{at}"])
                )[..., None],
                lambda nodes, at=layer: jax.nn.elu(nodes.reshape(len(nodes), -1) @ w[f"out{at}"]),
            )(graph)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(graph.nodes), labels[:, None], 1))

    return train(loss, weights, (x, *ends, labels), mesh, width - 1)


@program("transformers")
def flax_distillation(scale: Scale) -> Case:
    """FlaxDistilBertForMaskedLM learns from a frozen FlaxBertForMaskedLM, with AdamW."""
    from transformers import BertConfig, DistilBertConfig, FlaxBertForMaskedLM, FlaxDistilBertForMaskedLM

    mesh, width = scale.mesh(data=2, model=4), scale.pick(64, 1024)
    teacher = FlaxBertForMaskedLM(
        BertConfig(vocab_size=512, hidden_size=2 * width, num_hidden_layers=2, num_attention_heads=8,
                   intermediate_size=4 * width, max_position_embeddings=512), _do_init=False)  # fmt: skip
    student = FlaxDistilBertForMaskedLM(
        DistilBertConfig(vocab_size=512, dim=width, n_layers=2, n_heads=8, hidden_dim=4 * width, dropout=0.0,
                         attention_dropout=0.0), _do_init=False)  # fmt: skip
    known, weights = (
        sharded_like(jax.eval_shape(lambda one=one: one.init_weights(jax.random.key(0), (1, 8))), rule, mesh)
        for one, rule in ((teacher, by_name(BERT)), (student, fsdp("model")))
    )
    tokens = shaped(mesh, P("data", None), (scale.pick(8, 32), scale.pick(32, 256)), jnp.int32)

    def loss(weights: Any, known: Any, tokens: Any) -> Any:
        soft = jax.nn.softmax(jax.lax.stop_gradient(teacher(tokens, params=known, train=False).logits) / 2)
        logits = student(tokens, params=weights, train=False).logits
        return -jnp.mean(jnp.sum(soft * jax.nn.log_softmax(logits / 2), -1))

    return train(loss, weights, (known, tokens), mesh, 511)


@program("jax")
def decode_loop(scale: Scale) -> Case:
    """Eight tokens generated in a loop by two layers with caches of keys and values, each sampled of the best 16."""
    mesh = scale.mesh(data=2, model=4)
    sizes = LlamaSizes(scale.pick(128, 2048), 2, scale.pick(512, 32000), scale.pick(8, 64), scale.pick(64, 2048))
    batch, length, kv, depth = sizes.batch, sizes.length, sizes.kv_heads, sizes.depth
    columns = ("q", "k", "v", "gate", "up", "head")

    def rule(path: str, leaf: Any) -> Any:
        if leaf.ndim < 2:
            return P()
        return P(None, "model") if any(f"['{name}']" in path for name in columns) else P("model", None)

    weights = sharded_like(sizes.shapes(jnp.float32, False), rule, mesh)
    caches = [
        {name: shaped(mesh, P("data", None, "model"), (batch, length, kv, depth)) for name in ("k", "v")}
        for _ in range(2)
    ]
    tokens = shaped(mesh, P("data"), (batch,), jnp.int32)
    key = jax.ShapeDtypeStruct((), jax.eval_shape(lambda: jax.random.key(0)).dtype, sharding=NamedSharding(mesh, P()))

    def normalize(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def forward(w: Any, caches: Any, token: Any, place: Any) -> Any:
        x, after = w["embedding"][token], []
        for one, cache in zip(w["layers"], caches, strict=True):
            h = normalize(x, one["norm1"])
            made = {name: (h @ one[name]).reshape(batch, 1, kv, depth) for name in ("k", "v")}
            cache = {name: jax.lax.dynamic_update_slice_in_dim(cache[name], made[name], place, 1) for name in made}
            q = (h @ one["q"]).reshape(batch, kv, -1, depth)
            scores = jnp.einsum("bgrd,bmgd->bgrm", q, cache["k"]) * depth**-0.5
            scores = jnp.where(jnp.arange(length) <= place, scores, -1e9)
            mixed = jnp.einsum("bgrm,bmgd->bgrd", jax.nn.softmax(scores), cache["v"])
            x = x + mixed.reshape(x.shape) @ one["o"]
            h = normalize(x, one["norm2"])
            x = x + (jax.nn.silu(h @ one["gate"]) * (h @ one["up"])) @ one["down"]
            after.append(cache)
        return normalize(x, w["norm"]) @ w["head"], after

    def generate(weights: Any, caches: Any, token: Any, key: Any) -> Any:
        def body(carry: Any, place: Any) -> Any:
            caches, token, key = carry
            logits, caches = forward(weights, caches, token, place)
            best, names = jax.lax.top_k(logits, 16)
            key, mine = jax.random.split(key)
            drawn = jax.random.categorical(mine, best / 0.8)
            token = jnp.take_along_axis(names, drawn[:, None], 1)[:, 0].astype(jnp.int32)
            return (caches, token, key), token

        (caches, token, key), made = jax.lax.scan(body, (caches, token, key), jnp.arange(8))
        return caches, token, made

    return Case(generate, (weights, caches, tokens, key), {"donate_argnums": 1}, sizes.vocabulary - 1)


@program("optax")
def optax_galore(scale: Scale) -> Case:
    """optax: a mixer of tokens and channels under gradients that are averaged over two batches, with GaLore."""
    import optax
    from optax import contrib

    mesh, width, places = scale.mesh(data=2, model=4), scale.pick(64, 1024), scale.pick(32, 256)
    shapes = [
        {"tokens1": (places, 2 * places), "tokens2": (2 * places, places), "up": (width, 4 * width),
         "down": (4 * width, width)} for _ in range(2)
    ]  # fmt: skip
    made = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    optimizer = optax.MultiSteps(contrib.galore(1e-3, rank=8), 2)
    weights = sharded_like(made, fsdp("model"), mesh)
    kept = sharded_like(jax.eval_shape(optimizer.init, made), fsdp("model"), mesh)
    x = shaped(mesh, P("data"), (scale.pick(16, 64), places, width))

    def step(weights: Any, kept: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                h = jnp.swapaxes(jax.nn.standardize(y), 1, 2)
                y = y + jnp.swapaxes(jax.nn.gelu(h @ w["tokens1"]) @ w["tokens2"], 1, 2)
                y = y + jax.nn.gelu(jax.nn.standardize(y) @ w["up"]) @ w["down"]
            return jnp.mean((y - jnp.roll(x, 1, 1)) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept, weights)
        return optax.apply_updates(weights, updates), after, value

    return finish_case(step, weights, kept, (x,), mesh)
