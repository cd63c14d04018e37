"""`redistribute(x, sharding, have=..., changed=...)`: through views and casts, on one set of devices and on others."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.fuzz_moves import random_changes
from reshard.errors import PlanError
from reshard.jax import redistribute
from reshard.jax.crossing import across

DEVICES = jax.devices()


def on(devices: slice, shape: tuple[int, ...], *spec: object) -> NamedSharding:
    axes = ("a", "b")[: len(shape)]
    mesh = jax.sharding.Mesh(np.array(DEVICES[devices]).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, P(*spec))


ROWS, WIDE = on(slice(0, 4), (4,), "a"), np.arange(24 * 16, dtype="float32").reshape(24, 16)
SPLIT: dict[str, Any] = {"view": "(three h) m -> three h m", "three": 3, "take": {"three": slice(1, 3)}}
CASES = {
    "one set": (on(slice(0, 4), (4,), None, "a"), {}, lambda x: x),
    "other devices": (on(slice(4, 8), (2, 2), None, "b"), {}, lambda x: x),
    "overlapping": (on(slice(2, 8), (3, 2), "a", "b"), {}, lambda x: x),
    "in another order": (on(slice(3, None, -1), (4,), None, "a"), {}, lambda x: x),
    "a view": (on(slice(4, 8), (4,), None, "a"), SPLIT, lambda x: x.reshape(3, 8, 16)[1:]),
    "a cast": (on(slice(4, 8), (4,), "a"), {"dtype": "bfloat16"}, lambda x: x.astype(jax.numpy.bfloat16)),
    "both": (
        on(slice(0, 4), (4,), None, None, "a"),
        {**SPLIT, "dtype": "bfloat16"},
        lambda x: x.reshape(3, 8, 16)[1:].astype(jax.numpy.bfloat16),
    ),
    "a part": (on(slice(4, 8), (2, 2), "a"), {"into": {0: slice(4, 28)}}, lambda x: np.pad(x, ((4, 4), (0, 0)))),
}


def stale_array(meaning: Any, stale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the target means, and the same where it is stale, which no move may leave so."""
    return meaning(WIDE), meaning(np.where(stale, -1, WIDE).astype("float32"))


MARKS = dict.fromkeys(("in another order", "a view", "both", "a part"), pytest.mark.slow)
MARKS |= dict.fromkeys(("a cast", "overlapping"), pytest.mark.sweep)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        *(pytest.param(name, True, id=name) for name in CASES),
        *(pytest.param(n, False, id=f"{n}-programs", marks=MARKS.get(n, ())) for n in CASES),
    ],
)
def test_what_has_changed_moves(monkeypatch: pytest.MonkeyPatch, name: str, host: bool):
    target, options, meaning = CASES[name]
    if not host:  # As on accelerators.
        monkeypatch.setattr(import_module("reshard.jax.redistribute"), "on_host", lambda *_: False)
        monkeypatch.setattr(across, "on_host", lambda *_: False)
    x = jax.device_put(WIDE, ROWS)
    for seed in range(3) if host else (7,):
        changed, stale = random_changes(random.Random(f"{name}/{seed}"), WIDE.shape)
        wanted, old = stale_array(meaning, stale)
        have = jax.device_put(old, target)
        moved = redistribute(x, target, have=have, changed=changed, **options)
        assert moved.sharding.is_equivalent_to(target, moved.ndim) and np.array_equal(moved, wanted)
        assert np.array_equal(have, old) and np.array_equal(x, WIDE)


@pytest.mark.parametrize("held", [on(slice(4, 8), (4,), "a"), on(slice(0, 8), (2, 4), "b"), None])
def test_what_is_held_may_lie_elsewhere(held: NamedSharding | None):
    target = on(slice(4, 8), (4,), None, "a")
    wanted, old = stale_array(lambda x: x, np.arange(24)[:, None] % 5 == np.zeros(16))
    have = jax.device_put(old, DEVICES[4] if held is None else held)
    x = jax.device_put(WIDE, ROWS)
    moved = redistribute(x, target, have=have, changed=range(0, 24, 5), donate=True)
    assert moved.sharding == target and np.array_equal(moved, wanted) and x.is_deleted()


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch):
    target = on(slice(4, 8), (4,), None, "a")
    x, have = jax.device_put(WIDE, ROWS), jax.device_put(WIDE, target)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"changed": [1]}, "have=None: give the jax array"),
        ({"have": WIDE, "changed": [1]}, "give the jax array"),
        ({"have": have[1:], "changed": [1]}, r"have= is float32\[23, 16\], and the target float32\[24, 16\]"),
        ({"have": have, "changed": [24]}, "no index of a dim of 24"),
        ({"have": have, "changed": [1], "out": have}, "given once, as have="),
        ({"have": have, "changed": [1], "dtype": "bfloat16"}, "have= is float32"),
    ]
    for options, message in refused:
        with pytest.raises(PlanError, match=message):
            redistribute(x, target, **options)
    with pytest.raises(PlanError, match="outside of jit"):
        jax.jit(lambda v: redistribute(v, target, have=have, changed=[1]))(x)
    monkeypatch.setattr(import_module("reshard.jax.redistribute"), "on_host", lambda *_: False)
    with pytest.raises(PlanError, match="bring it there first"):
        redistribute(x, target, have=jax.device_put(WIDE, ROWS), changed=[1])
