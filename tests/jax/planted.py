"""Training and serving steps with one to three bad shardings each, and the same steps repaired.

Each function takes whether it is to be `repaired`, and returns what is jitted, its arguments and the options of
`jax.jit`. What is bad is marked by `# planted` on its line; bad shardings of arguments and results are said by
`wanted`.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax import planted_helpers


class Planted(NamedTuple):
    """A step: its function, and the kind and part of the name of what is bad if that is not on a line."""

    make: object
    wanted: tuple[str, str] = ("", "")

    @property
    def name(self):
        return self.make.__name__

    @property
    def lines(self):
        """The lines of bad shardings, `planted.py:42`."""
        source, first = inspect.getsourcelines(self.make)
        marked = [first + at for at, line in enumerate(source) if "# planted" in line]
        return {f"{Path(inspect.getsourcefile(self.make)).name}:{line}" for line in marked}

    def is_right(self, change):
        """Whether a change is of something that is bad here."""
        if self.wanted[0]:
            return change.kind == self.wanted[0] and self.wanted[1] in change.line
        return any(change.line.endswith(line) for line in self.lines)


def make_mesh(*axes, explicit=False):
    sizes = [size for _, size in axes]
    names = [name for name, _ in axes]
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(np.array(jax.devices()[:8]).reshape(sizes), names, axis_types=(kind,) * len(names))


def shaped(mesh, shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def transformer(repaired):
    """The three bad constraints of one transformer: at the heads, behind attention, and at the logits."""
    mesh = make_mesh(("dp", 4), ("tp", 2))

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def attend(h, w):
        q, k, v = (jnp.einsum("bsd,dhe->bshe", h, w[name]) for name in ("q", "k", "v"))
        q = constrain(q, *(("dp", None, "tp", None) if repaired else (None, "dp", "tp", None)))  # planted
        k = constrain(k, "dp", None, "tp", None)
        v = constrain(v, "dp", None, "tp", None)
        scores = jnp.einsum("bshe,bthe->bhst", q, k)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), v)
        return jnp.einsum("bshe,hed->bsd", mixed, w["o"])

    def block(h, w):
        h = h + constrain(attend(h, w), *(("dp", None, None) if repaired else (None, None, "dp")))  # planted
        u = constrain(jax.nn.gelu(h @ w["up"]), "dp", None, "tp")
        return h + constrain(u @ w["down"], "dp", None, None)

    def loss(params, tokens):
        h = constrain(params["embed"][tokens], "dp", None, None)
        for w in params["layers"]:
            h = block(h, w)
        logits = h @ params["embed"].T
        logits = constrain(logits, *(("dp", None, "tp") if repaired else (None, None, "tp")))  # planted
        logits = logits - jax.scipy.special.logsumexp(logits, -1, keepdims=True)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    def step(params, tokens):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, tokens))

    make = partial(shaped, mesh)
    heads = {name: make((64, 4, 16), None, "tp", None) for name in ("q", "k", "v")}
    layer = heads | {"o": make((4, 16, 64), "tp", None, None)}
    layer |= {"up": make((64, 256), None, "tp"), "down": make((256, 64), "tp", None)}
    params = {"embed": make((512, 64), "tp", None), "layers": [layer, layer]}
    return step, (params, make((32, 64), "dp", None, dtype="int32")), {"donate_argnums": 0}


def scanned(repaired):
    """Layers in a scan with remat: a carry that is split over the sequence leaves each layer."""
    mesh = make_mesh(("dp", 4), ("tp", 2))

    def at(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    @jax.checkpoint
    def layer(h, w):
        u = at(jax.nn.silu(h @ w["up"]), "dp", None, "tp")
        h = h + at(u @ w["down"], "dp", None, None)
        h = at(h, *(("dp", None, None) if repaired else (None, "dp", None)))  # planted
        return h, None

    def loss(layers, x):
        h, _ = jax.lax.scan(layer, at(x, "dp", None, None), layers)
        return jnp.mean(jnp.square(h))

    def step(layers, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers, x))

    make = partial(shaped, mesh)
    layers = {"up": make((4, 64, 128), None, None, "tp"), "down": make((4, 128, 64), None, "tp", None)}
    return step, (layers, make((16, 64, 64), "dp", None, None)), {"donate_argnums": 0}


def accumulation(repaired):
    """Microbatches in a scan: gradients are kept whole on every device, parameters are split (FSDP)."""
    mesh = make_mesh(("fsdp", 8))

    def loss(params, x):
        h = jax.nn.relu(x @ params["a"])
        return jnp.mean(jnp.square(jax.nn.relu(h @ params["b"]) @ params["c"]))

    def keep(spec, g):
        return jax.lax.with_sharding_constraint(g, NamedSharding(mesh, spec))

    def step(params, batches):
        def add(total, x):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp", None)))
            gradient = jax.grad(loss)(params, x)
            total = jax.tree.map(jnp.add, total, gradient)
            spec = P("fsdp", None) if repaired else P(None, None)
            return jax.tree.map(partial(keep, spec), total), None  # planted

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    make = partial(shaped, mesh)
    params = {"a": make((128, 512), "fsdp", None), "b": make((512, 512), "fsdp", None)}
    params["c"] = make((512, 128), "fsdp", None)
    return step, (params, make((4, 64, 128), None, "fsdp", None)), {"donate_argnums": 0}


def decode(repaired):
    """One token of a decoder with a cache: the new keys and the scores are split unlike the cache."""
    mesh = make_mesh(("dp", 4), ("tp", 2))

    def say(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(w, cache, x, at):
        keys, values = cache
        q, k, v = (jnp.einsum("bd,dhe->bhe", x, w[name]) for name in ("q", "k", "v"))
        keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, at, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v[:, None], (0, at, 0, 0))
        seen = say(keys, *(("dp", None, "tp", None) if repaired else (None, "dp", "tp", None)))  # planted
        scores = say(jnp.einsum("bhe,bthe->bht", q, seen), "dp", "tp", None)
        mixed = jnp.einsum("bht,bthe->bhe", jax.nn.softmax(scores), values)
        return say(jnp.einsum("bhe,hed->bd", mixed, w["o"]), "dp", None), (keys, values)

    make = partial(shaped, mesh)
    w = {name: make((64, 4, 16), None, "tp", None) for name in ("q", "k", "v")} | {"o": make((4, 16, 64), "tp")}
    cache = (make((32, 128, 4, 16), "dp", None, "tp"),) * 2
    arguments = (w, cache, make((32, 64), "dp"), jax.ShapeDtypeStruct((), "int32"))
    return step, arguments, {"donate_argnums": 1}


def convnet(repaired):
    """Images over the batch; one stage is split over channels, by a helper in another module."""
    mesh = make_mesh(("batch", 8))
    shard = partial(planted_helpers.shard_images, mesh)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(w, x):
        h = jax.nn.relu(shard(convolve(x, w[0]), "batch"))
        h = jax.nn.relu(shard(convolve(h, w[1]), "batch"))
        h = jax.nn.relu(shard(convolve(h, w[2]), "batch" if repaired else "channels"))  # planted
        h = jax.nn.relu(shard(convolve(h, w[3]), "batch"))
        return jnp.mean(jnp.square(h.mean((1, 2))))

    def step(w, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    make = partial(shaped, mesh)
    w = [make((3, 3, 3, 16)), make((3, 3, 16, 16)), make((3, 3, 16, 16)), make((3, 3, 16, 16))]
    return step, (w, make((16, 16, 16, 3), "batch")), {}


def explicit(repaired):
    """Explicit types: a reshard in the middle splits the features instead of the batch."""
    mesh = make_mesh(("data", 8), explicit=True)

    def loss(w, x):
        h = jax.nn.relu(jnp.einsum("bd,df->bf", x, w["a"]))
        h = jax.sharding.reshard(h, NamedSharding(mesh, P("data", None) if repaired else P(None, None)))  # planted
        h = jax.nn.relu(jnp.einsum("bf,fd->bd", h, w["b"]))
        return jnp.mean(jnp.square(h))

    def step(w, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    make = partial(shaped, mesh)
    w = {"a": make((64, 256), None, None), "b": make((256, 64), None, None)}
    return step, (w, make((1024, 64), "data", None)), {}


def optimizer_state(repaired):
    """Adam with its moments split like the parameters; one moment leaves the step whole on every device."""
    mesh = make_mesh(("fsdp", 8))
    split, whole = NamedSharding(mesh, P("fsdp", None)), NamedSharding(mesh, P(None, None))

    def loss(params, x):
        h = jax.nn.relu(x @ params["a"])
        return jnp.mean(jnp.square(h @ params["b"]))

    def step(params, mu, nu, x):
        gradient = jax.grad(loss)(params, x)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, gradient)
        nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, nu, gradient)
        params = jax.tree.map(lambda p, m, n: p - 0.1 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
        return params, mu, nu

    make = partial(shaped, mesh)
    params = {"a": make((256, 512), "fsdp", None), "b": make((512, 256), "fsdp", None)}
    like = jax.tree.map(lambda _: split, params)
    moments = like if repaired else jax.tree.map(lambda _: whole, params)
    options = {"out_shardings": (like, like, moments), "donate_argnums": (0, 1, 2)}
    return step, (params, params, params, make((64, 256), "fsdp", None)), options


def argument(repaired):
    """A stack of layers whose weights are split over the dim that is multiplied, all but those of one."""
    mesh = make_mesh(("dp", 4), ("tp", 2))

    def along(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def forward(layers, x):
        h = x
        for w in layers:
            h = along(jax.nn.relu(h @ w["up"]), "dp", "tp")
            h = along(h @ w["down"], "dp", None)
        return h

    make = partial(shaped, mesh)
    layer = {"up": make((128, 512), None, "tp"), "down": make((512, 128), "tp", None)}
    bad = layer if repaired else layer | {"down": make((512, 128), ("dp", "tp"), None)}
    return forward, ([layer, bad, layer], make((64, 128), "dp", None)), {}


def channels_split(repaired):
    """A convolutional net over batches, split over channels in one layer."""
    mesh = make_mesh(("batch", 8))
    good, bad = (NamedSharding(mesh, spec) for spec in (P("batch"), P(None, None, None, "batch")))

    def step(kernels, x):
        for at, kernel in enumerate(kernels):
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.lax.with_sharding_constraint(jax.nn.relu(x), bad if at == 1 and not repaired else good)  # planted
        return x.mean((1, 2))

    make = partial(shaped, mesh)
    return step, ([make((3, 3, 32, 32))] * 4, make((16, 64, 64, 32), "batch")), {}


def expert_tokens(repaired):
    """Experts, whose tokens are split over features."""
    mesh = make_mesh(("dp", 2), ("ep", 4))

    def on(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(router, up, down, x):
        chosen = jax.nn.one_hot(jax.nn.softmax(x @ router).argmax(-1), 8)
        inside = jnp.einsum("te,td->etd", chosen, x)
        inside = on(inside, *(("ep", "dp") if repaired else (None, "ep", "dp")))  # planted
        hidden = on(jax.nn.relu(jnp.einsum("etd,edf->etf", inside, up)), "ep", "dp")
        return jnp.einsum("etd,te->td", jnp.einsum("etf,efd->etd", hidden, down), chosen)

    make = partial(shaped, mesh)
    experts = make((8, 256, 1024), "ep"), make((8, 1024, 256), "ep")
    return step, (make((256, 8)), *experts, make((1024, 256), "dp")), {}


PLANTED = [
    Planted(transformer),
    Planted(scanned),
    Planted(accumulation),
    Planted(decode),
    Planted(convnet),
    Planted(channels_split),
    Planted(expert_tokens),
    Planted(explicit),
    Planted(optimizer_state, ("out_sharding", "result[2]")),
    Planted(argument, ("in_sharding", "layers[1]['down']")),
]
