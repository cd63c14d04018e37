"""Ten more steps with bad shardings, written by someone who had not seen the search for advice; see `planted.py`."""

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as wsc
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.planted import Planted, make_mesh, shaped

F = "float32"


def mesh_of(**axes):
    return make_mesh(*axes.items())


def S(mesh, shape, *spec, dtype=F):
    return shaped(mesh, shape, *spec, dtype=dtype)


def N(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def wide_mlp(repaired):
    """Tensor parallelism; one hidden layer is split over the wrong dims."""
    m = mesh_of(dp=4, tp=2)
    good = N(m, "dp", "tp")

    def loss(ps, x):
        for i, (a, b) in enumerate(ps):
            h = jax.nn.gelu(x @ a)
            h = wsc(h, N(m, None, ("tp", "dp")) if i == 2 and not repaired else good)  # planted
            x = wsc(x + h @ b, N(m, "dp", None))
        return (x**2).mean()

    ps = [(S(m, (512, 2048), None, "tp"), S(m, (2048, 512), "tp", None)) for _ in range(4)]
    return jax.grad(loss), (ps, S(m, (1024, 512), "dp")), {}


def attention_scores(repaired):
    """Attention by heads, whose scores are split over positions."""
    m = mesh_of(data=2, model=4)

    def step(w, o, x):
        q, k, v = jnp.einsum("bsd,dthk->tbshk", x, w)
        q = wsc(q, N(m, "data", None, "model"))
        s = jnp.einsum("bshk,bthk->bhst", q, k) / 8
        s = wsc(s, N(m, None, None, "model", "data") if not repaired else N(m, "data", "model"))  # planted
        p = jax.nn.softmax(s, axis=-1)
        y = jnp.einsum("bhst,bthk->bshk", p, v)
        return wsc(x + jnp.einsum("bshk,hkd->bsd", y, o), N(m, "data"))

    return (
        step,
        (S(m, (512, 3, 8, 64), None, None, "model"), S(m, (8, 64, 512), "model"), S(m, (8, 512, 512), "data")),
        {},
    )


def scanned_blocks(repaired):
    """A scan of blocks with remat, whose carry is split over features."""
    m = mesh_of(fsdp=8)

    def block(x, w):
        a, b = w
        x = wsc(x, N(m, None, None, "fsdp") if not repaired else N(m, "fsdp"))  # planted
        h = jax.nn.silu(jnp.einsum("bsd,df->bsf", x, a))
        x = x + jnp.einsum("bsf,fd->bsd", h, b)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), None

    def loss(ws, x):
        x, _ = jax.lax.scan(jax.checkpoint(block), x, ws)
        return (x * x).mean()

    ws = (S(m, (6, 256, 1024), None, "fsdp"), S(m, (6, 1024, 256), None, "fsdp"))
    return jax.value_and_grad(loss), (ws, S(m, (32, 128, 256), "fsdp")), {}


def moments_whole(repaired):
    """AdamW under FSDP, whose first moment is a result that every device has whole."""
    m = mesh_of(fsdp=8)
    own = N(m, "fsdp")

    def step(p, mu, nu, x):
        g = jax.grad(lambda p: (jnp.tanh(x @ p[0]) @ p[1]).var())(p)
        g = [wsc(a, own) for a in g]
        mu = [0.9 * a + 0.1 * b for a, b in zip(mu, g, strict=True)]
        nu = [0.99 * a + 0.01 * b * b for a, b in zip(nu, g, strict=True)]
        p = [a - 1e-3 * b / (jnp.sqrt(c) + 1e-8) for a, b, c in zip(p, mu, nu, strict=True)]
        return p, mu, nu

    tree = [S(m, (1024, 2048), "fsdp"), S(m, (2048, 1024), "fsdp")]
    outs = ([own] * 2, [N(m), N(m)] if not repaired else [own] * 2, [own] * 2)
    return step, (tree, tree, tree, S(m, (256, 1024), "fsdp")), {"out_shardings": outs}


def channels_split(repaired):
    """A convolutional net over batches, split over channels in one layer."""
    m = mesh_of(batch=8)

    def step(ks, x):
        for i, k in enumerate(ks):
            x = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x)
            x = wsc(x, N(m, None, None, None, "batch") if i == 1 and not repaired else N(m, "batch"))  # planted
        return x.mean((1, 2))

    ks = [S(m, (3, 3, 32, 32)) for _ in range(4)]
    return step, (ks, S(m, (16, 64, 64, 32), "batch")), {}


def decode_scores(repaired):
    """One token with a cache of keys and values by heads; the scores are split over time."""
    m = mesh_of(dp=2, tp=4)

    def step(cache_k, cache_v, q, k, v, at):
        cache_k = jax.lax.dynamic_update_slice(cache_k, k, (0, at, 0, 0))
        cache_v = jax.lax.dynamic_update_slice(cache_v, v, (0, at, 0, 0))
        s = jnp.einsum("bhk,bthk->bht", q, cache_k)
        s = wsc(s, N(m, "dp", None, "tp") if not repaired else N(m, "dp", "tp"))  # planted
        p = jax.nn.softmax(s, -1)
        return jnp.einsum("bht,bthk->bhk", p, cache_v), cache_k, cache_v

    c = S(m, (8, 2048, 8, 64), "dp", None, "tp")
    one = S(m, (8, 1, 8, 64), "dp", None, "tp")
    return (
        step,
        (c, c, S(m, (8, 8, 64), "dp", "tp"), one, one, jax.ShapeDtypeStruct((), jnp.int32)),
        {"donate_argnums": (0, 1)},
    )


def expert_tokens(repaired):
    """Experts, whose tokens are split over features."""
    m = mesh_of(dp=2, ep=4)

    def step(router, w1, w2, x):
        g = jax.nn.softmax(x @ router)
        e = jax.nn.one_hot(g.argmax(-1), 8)
        xe = jnp.einsum("te,td->etd", e, x)
        xe = wsc(xe, N(m, None, "ep", "dp") if not repaired else N(m, "ep", "dp"))  # planted
        h = jax.nn.relu(jnp.einsum("etd,edf->etf", xe, w1))
        h = wsc(h, N(m, "ep", "dp"))
        y = jnp.einsum("etf,efd->etd", h, w2)
        return jnp.einsum("etd,te->td", y, e)

    return step, (S(m, (256, 8)), S(m, (8, 256, 1024), "ep"), S(m, (8, 1024, 256), "ep"), S(m, (1024, 256), "dp")), {}


def constrain(mesh, x, *names):
    rules = {"batch": "dp", "seq": None, "embed": None, "mlp": "tp", "heads": "tp", "wrong": "dp"}
    return wsc(x, NamedSharding(mesh, P(*(rules.get(n) for n in names))))


def named_rules(repaired):
    """Constraints by names of dims through a helper; one call has a wrong name."""
    m = mesh_of(dp=4, tp=2)

    def layer(x, w):
        a, b = w
        x = constrain(m, x, "batch", "seq", "embed")
        h = jnp.einsum("bsd,df->bsf", x, a)
        names = ("batch", "seq", "mlp") if repaired else ("seq", "wrong", "mlp")
        h = constrain(m, h, *names)  # planted
        h = jax.nn.gelu(h)
        return constrain(m, x + jnp.einsum("bsf,fd->bsd", h, b), "batch", "seq", "embed")

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return (x.astype(F) ** 2).sum()

    ws = [(S(m, (256, 1024), None, "tp"), S(m, (1024, 256), "tp")) for _ in range(3)]
    return jax.grad(loss), (ws, S(m, (16, 256, 256), "dp")), {}


def logits_by_batch(repaired):
    """A loss over a vocabulary that is split, whose logits are not."""
    m = mesh_of(dp=2, tp=4)

    def loss(emb, w, tokens, labels):
        x = wsc(emb[tokens], N(m, "dp"))
        h = wsc(jnp.tanh(x @ w), N(m, "dp"))
        z = jnp.einsum("bsd,vd->bsv", h, emb)
        z = wsc(z, N(m, None, "dp") if not repaired else N(m, "dp", None, "tp"))  # planted
        ls = jax.nn.logsumexp(z, -1)
        got = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
        return (ls - got).mean()

    t = S(m, (16, 128), "dp", dtype="int32")
    return jax.grad(loss, argnums=(0, 1)), (S(m, (8192, 256), "tp"), S(m, (256, 256)), t, t), {}


def microbatches(repaired):
    """Gradients of microbatches added up; activations whole, and gradients split unlike their parameters."""
    m = mesh_of(dp=4, fsdp=2)
    both = ("dp", "fsdp")

    def loss(w, x):
        h = wsc(jax.nn.relu(x @ w[0]), N(m) if not repaired else N(m, both))  # planted
        return ((h @ w[1]) ** 2).mean()

    def step(w, xs):
        def body(g, x):
            d = jax.grad(loss)(w, x)
            g = [
                wsc(a + b, N(m, None, "dp") if not repaired else N(m, "fsdp")) for a, b in zip(g, d, strict=True)
            ]  # planted
            return g, None

        zero = [jnp.zeros(a.shape, a.dtype) for a in w]
        g, _ = jax.lax.scan(body, zero, xs)
        return [wsc(a - 1e-2 * b, N(m, "fsdp")) for a, b in zip(w, g, strict=True)]

    w = [S(m, (512, 2048), "fsdp"), S(m, (2048, 512), "fsdp")]
    return step, (w, S(m, (4, 4096, 512), None, both)), {}


UNSEEN = [
    Planted(wide_mlp),
    Planted(attention_scores),
    Planted(scanned_blocks),
    Planted(moments_whole, ("out_sharding", "result[1]")),
    Planted(channels_split),
    Planted(decode_scores),
    Planted(expert_tokens),
    Planted(named_rules),
    Planted(logits_by_batch),
    Planted(microbatches),
]
