"""Settings shared by all tests.

Hypothesis runs the same examples every time; `HYPOTHESIS_PROFILE=explore` looks for new ones. jax, once a
test imports it, has 8 virtual CPU devices and looks for no others.
"""

import gc
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"  # XLA ends a process of which a device waits 40 s.
if PATIENCE not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {PATIENCE}=600"
# LLVM's level: XLA makes the same program, compiled in 0.6 of the time. Tanh has other bits at a loop's end then:
# tests of bits, whose loops get other lengths, take a square root.
QUICK = "--xla_backend_optimization_level"
if QUICK not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {QUICK}=0"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["RESHARD_CACHE"] = os.devnull  # plans are for presets, not for what somebody has measured here
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu, where it is installed, would ask a server that is not there
# Ranks that wait sleep, where there are more of them than cores: with another test beside, they take half as long.
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # otherwise the second of two processes fails at libtpu's lock file


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is collected is garbage: a quarter of the time would go into looking for some."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Plans are many small objects without cycles: to look for some took a tenth of the tests' time.
        gc.set_threshold(200_000, 20, 5)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """The tests themselves have no examples in their docstrings, and looking for them takes long."""
    collectors: Any = yield
    return [collector for collector in collectors if type(collector) is pytest.Module]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.fast(n, slow=m)`: n cases of a parametrized test stay in the fast tier, and m of the others, 4 if
    that is not said, are marked slow; the rest are sweeps."""
    families: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast") and not any(item.iter_markers("sweep")):
            families[item.nodeid.partition("[")[0]].append(item)
    for name, family in families.items():
        marker = family[0].get_closest_marker("fast")
        assert marker is not None
        for item in _rest(name, [item for item in family if not any(item.iter_markers("slow"))], *marker.args):
            item.add_marker(pytest.mark.slow)
        slow = [item for item in family if any(item.iter_markers("slow"))]
        for item in random.Random(name).sample(slow, max(0, len(slow) - marker.kwargs.get("slow", 4))):
            item.add_marker(pytest.mark.sweep)

    # What takes a minute begins first: at the end, one process would run it while the others have nothing left.
    items.sort(key=lambda item: item.path.name not in LONGEST)


LONGEST = {"test_notebooks.py", "test_demo.py"}


def _rest(name: str, family: list[pytest.Item], count: int) -> list[pytest.Item]:
    """All but the first case and `count - 1` others, the same ones in every process and every run."""
    return random.Random(name).sample(family[1:], max(0, len(family) - count))
