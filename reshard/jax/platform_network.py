"""The network of the devices that a move runs on, where the caller names none.

$RESHARD_NETWORK              a preset, a file as `reshard calibrate` writes it, or "none"; else by the devices:
TPU v4 ... 7x, H100 ... B200  the preset of their kind
CPUs and others               none: plans have the fewest bytes
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from reshard.jax import placement
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.runtime.platform_network import choose_network
from reshard.synth import Network, cost
from reshard.synth.network import PRESETS
from reshard.synth.options import PlanOptions, read_network
from reshard.synth.planner import find_plan
from reshard.synth.short import message_count, short_plans
from reshard.types.move import Move

LONG = 8192
"""The most messages that permutes and exchanges may list, 270 kB of text: two permutes on 4,096 devices, or 32 rounds
of an exchange on 256, which need less memory and fewer bytes than two all-to-alls."""
SLOWER = 1.6
"""How many times as long a plan of few messages may take as one of many: 1.5 for an all-to-all and a permute in place
of an exchange that does both.
"""

_KINDS = (
    (r"TPU v4\b", "tpu-v4"),
    (r"TPU v5( lite|e)\b", "tpu-v5e"),
    (r"TPU v5p?\b", "tpu-v5p"),
    (r"TPU v6( lite|e)\b", "tpu-v6e"),
    (r"TPU ?v?7x?\b", "tpu-7x"),
    (r"\bH100\b", "h100"),
    (r"\bH200\b", "h200"),
    (r"\bGB200\b", "gb200-nvl72"),
    (r"\bB200\b", "b200"),
)


def platform_network(kind: str) -> Network | None:
    """The network of devices of a kind, as jax names it; None for those that no preset is of.

    Raises `NetworkError` if `RESHARD_NETWORK` names neither a preset nor a file.

    >>> str(platform_network("TPU v5 lite")), str(platform_network("NVIDIA H100 80GB HBM3")), platform_network("cpu")
    ('tpu-v5e', 'h100', None)
    """
    chosen = choose_network(None)
    if chosen is not None:
        return read_network(chosen)
    return next((PRESETS[name] for pattern, name in _KINDS if re.search(pattern, kind)), None)


def options_on(devices: Sequence[Any], options: PlanOptions) -> PlanOptions:
    """The options with the network of the devices, where the caller named none."""
    if options.network_named or not devices:
        return options
    return options._replace(network=platform_network(str(devices[0].device_kind)))


def best_plan(move: Move, devices: Sequence[Any], options: PlanOptions) -> Plan:
    """The best plan on the network that a caller names, else on that of the devices.

    A platform network that nobody asked for may not cost memory: the fastest plan on it is taken only if it needs no
    more memory than the plan of fewest bytes, both with their large steps in parts.
    """
    used = options_on(devices, options)
    fastest = find_plan(move, None, used)
    if options.network_named or used.network is None:
        return fastest
    fewest = find_plan(move, None, used._replace(network=None))
    needs, least = (on_jax.peak_bytes(on_jax.in_parts(each)) for each in (fastest, fewest))
    return fastest if needs <= least else fewest


def best_plan_on(mesh: placement.AnyMesh, move: Move, options: PlanOptions) -> Plan:
    """`best_plan` on the devices of a mesh, on no network where these are not known and none is named.

    Where nobody named the network, exchanges that are too long to compile give way to a few collectives.
    """
    devices = placement.devices_of(mesh)
    best, used = best_plan(move, devices, options), options_on(devices, options)
    # Short plans are found between two layouts alone: a view or a part would be lost.
    if options.network_named or used.network is None or not move.plain or message_count(best) <= LONG:
        return best
    return _short_plan(best, used, used.network, padded=placement.platform_of(mesh) == "tpu")


def _short_plan(fast: Plan, options: PlanOptions, network: Network, padded: bool) -> Plan:
    """Among the plans of few messages that take at most `SLOWER` times the seconds of `fast`, the one that needs the
    least memory; `fast` if there is none."""
    timed = cost.time_plan(fast, network.links(fast.source.mesh))
    plans = short_plans(fast.source, fast.target, LONG, options)
    quick = [plan for plan in plans if (plan.seconds or 0.0) <= SLOWER * (timed.seconds or 0.0)]

    def needs(plan: Plan) -> tuple[int, float]:
        return on_jax.peak_bytes(on_jax.in_parts(plan), padded), plan.seconds or 0.0

    return min(quick, key=needs, default=fast)
