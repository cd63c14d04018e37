"""How fast one device works: the seconds of an operation, from what it computes and what it reads and writes.

The roofline model: an operation takes as long as its arithmetic, or as its memory, whichever is more, and each call of
a program's operation some time of its own. A matrix product of f32[8192, 8192] with itself on a TPU v5p:

    arithmetic   2 * 8192^3 operations    at 459e12 a second     2.4 ms
    memory       3 * 256 MiB              at 2.77e12 a second    0.3 ms
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from reshard.errors import NetworkError, quoted


@dataclass(frozen=True)
class DeviceSpeed:
    """Operations a second by dtype, bytes a second to and from memory, and seconds of every call of an operation.

    `flops` has the rate of each dtype in which products are made; a dtype that it lacks has that of the first one
    listed: compilers multiply f32 in parts of that dtype by default. `source` cites the figures.
    Raises `NetworkError` for rates that are not positive and finite.

    >>> v5p = DeviceSpeed.preset("tpu-v5p")
    >>> f"{v5p.work_seconds(2 * 8192**3, 3 << 28) * 1e3:.2f} ms"
    '2.40 ms'
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes_per_second: float
    call_seconds: float = 0.0
    source: str = "user-defined"

    def __post_init__(self) -> None:
        # A rate of 0 would make work take forever, and one of infinity make all splits of it equal.
        rates = {"memory_bytes_per_second": self.memory_bytes_per_second, **self.flops}
        for what, rate in rates.items():
            if not 0 < rate < math.inf:
                raise NetworkError(f"{what} {quoted(rate)} of device speed {quoted(self.name)}: give a rate above 0")
        if not self.flops or not 0 <= self.call_seconds < math.inf:
            raise NetworkError(
                f"device speed {quoted(self.name)}: give flops, operations a second by dtype such as {{'bf16': 4e14}}, "
                f"and call_seconds of at least 0, not {quoted(self.call_seconds)}"
            )
        # Read only, and a copy: presets are shared by all who ask for them.
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def work_seconds(self, flops: float, nbytes: float, dtype: str = "") -> float:
        """Seconds of one run of an operation that computes so much and reads and writes so many bytes."""
        # The first dtype listed stands for others: a TPU multiplies f32 as bf16 unless asked for more precision.
        rate = self.flops.get(dtype) or next(iter(self.flops.values()))
        return max(flops / rate, nbytes / self.memory_bytes_per_second) + self.call_seconds

    @classmethod
    def preset(cls, name: str) -> DeviceSpeed:
        """The speed of that name in `SPEEDS`, those of the networks among them; raises `NetworkError` for any other.

        >>> DeviceSpeed.preset("h100").flops["bf16"]
        989000000000000.0
        """
        speed = SPEEDS.get(name.lower().replace("_", "-"))
        if speed is None:
            raise NetworkError(f"unknown device {quoted(name)}: the speeds known are {', '.join(SPEEDS)}")
        return speed


# Published peaks of one device: dense products, and the memory of a chip. Programs reach half of it to four fifths.

_CLOUD = "https://docs.cloud.google.com/tpu/docs"
_NVIDIA = "dense tensor-core rates and memory bandwidth of NVIDIA's data sheet"


def _tabulate_presets() -> dict[str, DeviceSpeed]:
    figures = (
        ("tpu-v4", {"bf16": 275e12, "s8": 275e12}, 1.2e12, f"{_CLOUD}/v4"),
        ("tpu-v5e", {"bf16": 197e12, "s8": 393e12}, 8.19e11, f"{_CLOUD}/v5e"),
        ("tpu-v5p", {"bf16": 459e12, "s8": 918e12}, 2.765e12, f"{_CLOUD}/v5p"),
        ("tpu-v6e", {"bf16": 918e12, "s8": 1836e12}, 1.638e12, f"{_CLOUD}/v6e"),
        # Two devices a chip, with equal shares of 2307 (bf16) and 4614 (fp8) TFLOP/s and 7380 GB/s.
        ("tpu-7x", {"bf16": 1153.5e12, "f8e4m3fn": 2307e12}, 3.69e12, f"{_CLOUD}/tpu7x"),
        ("a100", {"bf16": 312e12, "f16": 312e12, "s8": 624e12, "f64": 19.5e12}, 2.039e12, f"{_NVIDIA}, A100 80GB SXM"),
        ("h100", {"bf16": 989e12, "f16": 989e12, "f8e4m3fn": 1979e12, "f64": 67e12}, 3.35e12, f"{_NVIDIA}, H100 SXM"),
        ("h200", {"bf16": 989e12, "f16": 989e12, "f8e4m3fn": 1979e12, "f64": 67e12}, 4.8e12, f"{_NVIDIA}, H200 SXM"),
        ("b200", {"bf16": 2250e12, "f16": 2250e12, "f8e4m3fn": 4500e12}, 8e12, f"{_NVIDIA}, DGX B200"),
        ("gb200-nvl72", {"bf16": 2500e12, "f16": 2500e12, "f8e4m3fn": 5000e12}, 8e12, f"{_NVIDIA}, GB200 NVL72"),
        (
            "cpu",
            {"f32": 5e10, "f64": 2.5e10},
            1e10,
            "assumed: one core with AVX2 at 3 GHz, and its share of the memory",
        ),
    )
    return {name: DeviceSpeed(name, flops, memory, source=source) for name, flops, memory, source in figures}


SPEEDS: Mapping[str, DeviceSpeed] = MappingProxyType(_tabulate_presets())
"""Known devices by name, those of the presets of networks among them."""
