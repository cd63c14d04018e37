"""Trees whose leaves have views of their own: fused weights taken apart and put together, on other devices too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import PlanError
from reshard.jax import Target, redistribute, reshard_pytree
from reshard.jax.targets import ViewOptions
from tests.jax.crossing.cases import mesh
from tests.jax.oracle import assert_exact, filled

HERE, THERE = mesh(range(4), fsdp=4), mesh([4, 5, 6, 7], rep=2, tp=2)
SPLIT = {"view": "l (three h) d -> l h d", "three": 3}
QKV = filled((2, 24, 8))


def fused() -> dict[str, Any]:
    qkv = jax.device_put(QKV, NamedSharding(HERE, P(None, "fsdp")))
    return {"layers": {"q": qkv, "k": qkv, "v": qkv}, "norm": jax.device_put(filled((8,)), NamedSharding(HERE, P()))}


def targets(mesh: Any, axis: str, dtype: Any = None) -> dict[str, Any]:
    split = NamedSharding(mesh, P(None, axis))
    parts = {name: Target(split, take={"three": at}, dtype=dtype, **SPLIT) for at, name in enumerate("qkv")}
    return {"layers": parts, "norm": Target(NamedSharding(mesh, P()))}


@pytest.mark.fast(2)
@pytest.mark.parametrize(("where", "axis"), [(HERE, "fsdp"), (THERE, "tp")], ids=["here", "there"])
@pytest.mark.parametrize("options", [{}, {"budget": "1MiB"}, {"donate": True}, {"budget": "1MiB", "donate": True}])
@pytest.mark.parametrize("move", [redistribute, reshard_pytree])
def test_fused_weights_are_split(move: Any, where: Any, axis: str, options: dict[str, Any]) -> None:
    tree = fused()
    moved = move(tree, targets(where, axis), **options)
    for at, name in enumerate("qkv"):
        assert_exact(moved["layers"][name], NamedSharding(where, P(None, axis)), QKV[:, 8 * at : 8 * at + 8])
    assert_exact(moved["norm"], NamedSharding(where, P()), filled((8,)))
    assert tree["layers"]["q"].is_deleted() == ("donate" in options)


def test_parts_are_joined_and_cast() -> None:
    """Gate and up on the trainer, one array on the server, in bfloat16."""
    gate, up = filled((8, 8)), filled((8, 8)) + 100
    rows, target = NamedSharding(HERE, P("fsdp")), NamedSharding(THERE, P("tp"))
    fuse = {"view": "h d -> (two h) d", "two": 2, "dtype": jnp.bfloat16}
    empty = jax.device_put(np.zeros((16, 8), jnp.bfloat16), target)
    first = redistribute(jax.device_put(gate, rows), Target(target, into={"two": 0}, out=empty, **fuse))
    both = redistribute(jax.device_put(up, rows), Target(target, into={"two": 1}, out=first, **fuse))
    assert_exact(both, target, np.concatenate([gate, up]).astype(jnp.bfloat16))


def test_one_target_for_one_array_is_the_call_with_its_arguments() -> None:
    x, to = fused()["layers"]["q"], NamedSharding(THERE, P(None, "tp"))
    options = SPLIT | {"take": {"three": 1}}
    ours, same = redistribute(x, Target(to, **options)), redistribute(x, to, **options)
    assert np.array_equal(ours, same)
    assert ViewOptions().plain and not ViewOptions(take={0: 1}).plain


def test_a_donated_array_that_stays_is_not_deleted() -> None:
    x = jax.device_put(filled((8, 8)), NamedSharding(HERE, P("fsdp")))
    moved = redistribute([x, x], [x.sharding, NamedSharding(THERE, P("tp"))], donate=True)
    assert np.array_equal(moved[0], filled((8, 8))) and np.array_equal(moved[1], filled((8, 8)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"view": "a b c -> c b a", "scale": 2.0}, "casts nothing"),
        ({"dtype": "bfloat16", "scale": np.ones((2, 5, 1))}, "do not divide"),
        ({"dtype": "bfloat16", "into": {0: slice(0, 2)}}, "give its array with out="),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Exception, match=text) as raised:
        redistribute(fused()["layers"]["q"], Target(NamedSharding(THERE, P()), **options))
    assert isinstance(raised.value, (PlanError, ValueError)) or "scale" in str(raised.value)
