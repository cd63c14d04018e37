"""`reshard.jax.show`: what `reshard show` prints, of a live array; what has no sharding is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import reshard as rs
from reshard.errors import LayoutError, ReshardError
from reshard.jax import show
from reshard.show.layout_picture import show_layout


def test_a_live_array_is_shown_as_its_layout(capsys: pytest.CaptureFixture[str]):
    mesh = jax.sharding.Mesh([[device] for device in jax.devices()[:2]], ("x", "y"))
    show(jax.device_put(jnp.zeros((4, 6)), NamedSharding(mesh, PartitionSpec(None, "x"))))
    shown = capsys.readouterr().out
    show_layout(rs.Layout.parse("f32[4, {x}3]", rs.Mesh(x=2, y=1)), 32)
    assert shown == capsys.readouterr().out and "3:6" in shown


def test_what_has_no_sharding_is_refused():
    for given in (3, None, jax.ShapeDtypeStruct((4,), "float32")):
        with pytest.raises(ReshardError, match="has no sharding"):
            show(given)
    with pytest.raises(ReshardError, match="inspect_array_sharding"):
        jax.jit(lambda x: show(x))(jnp.zeros(4))
    with pytest.raises(LayoutError, match="not a NamedSharding"):
        show(jnp.zeros(4))
    for limit in (0, 10**30, True, "all"):
        with pytest.raises(ReshardError, match=f"limit {limit!r}"):
            show(jnp.zeros(4), limit=limit)  # pyright: ignore[reportArgumentType]
