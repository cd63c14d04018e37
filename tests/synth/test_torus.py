"""Where a mesh lies on the physical axes of a torus, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reshard.errors import NetworkError
from reshard.synth.link import Link
from reshard.synth.network import PRESETS, Network
from reshard.synth.wires import Torus
from reshard.types import Mesh


@pytest.mark.parametrize(
    ("preset", "sizes", "below"),
    [
        ("tpu-v5p", (8, 8), "4o 4o 4o"),
        ("tpu-v5p", (4, 4), "2 2 4"),
        ("tpu-v5p", (4, 8, 4), "4o 8o 4o"),
        ("tpu-v5p", (16, 16), "4o 8o 8o"),
        ("tpu-v5p", (8, 8, 8), "8o 8o 8o"),
        ("tpu-v5p", (3, 5), "3 5"),
        ("tpu-v5p", (1,), ""),
        ("tpu-v4", (4096,), "16o 16o 16o"),
        ("tpu-v5e", (16, 16), "16o 16o"),
        ("tpu-v5e", (8, 16), "8 16o"),
        ("tpu-v6e", (4, 8), "4 8"),
        ("tpu-7x", (64, 2), "4o 4o 4o 2o"),
    ],
)
def test_physical_axes_of_presets(preset: str, sizes: tuple[int, ...], below: str):
    torus = PRESETS[preset].torus
    assert torus is not None
    assert " ".join(f"{size}{'o' if wraps else ''}" for size, wraps in torus.under(sizes)) == below


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: Torus(axes=0), "axes 0 of a torus: give a whole number, 1 to 6"),
        (lambda: Torus(wrap=-1), "wrap -1 of a torus"),
        (lambda: Torus(cubes=1), "torus cubes 1: give True or False"),  # pyright: ignore[reportArgumentType]
        (lambda: Torus(shape=(4, 0)), r"shape \(4, 0\) of a torus: give the sizes"),
        (lambda: Torus(shape="4x4"), "shape '4x4' of a torus"),  # pyright: ignore[reportArgumentType]
        (lambda: Torus(shape={}), r"shape {} of a torus: give the sizes"),  # pyright: ignore[reportArgumentType]
        (lambda: Link(0, 1, "star"), "shape 'star' of a link: give one of switch, ring, line"),
        (lambda: Network("n", (0, 1), torus=3), "torus 3 of a network: give a Torus"),  # pyright: ignore[reportArgumentType]
        (lambda: Network("n", outer=(0, 1), torus=Torus()), "how inner links are wired, and there is none"),
        (
            lambda: Network.from_json('{"name": "n", "torus": {"axis": 3}}'),
            "torus: unknown key axis; the keys are",
        ),
        (
            lambda: Network("n", (0, 1), domain=64, torus=Torus(shape=(4, 4))).links(Mesh(x=8)),
            "the torus 4x4 has 16 devices, but the inner axes of the mesh have 8; give the shape of the slice",
        ),
    ],
)
def test_bad_wirings_are_refused(given: Callable[[], object], message: str):
    with pytest.raises(NetworkError, match=message):
        given()
