"""Writes the recorded modules of train.py into `data`: `python record.py`, with libtpu installed.

train.mlir                 its StableHLO, with the lines of train.py
train_cpu_VERSION.hlo      its optimized HLO for 8 CPU devices, and for v5p:2x2x2
train_v5p_VERSION.hlo
"""

import os
import re
from pathlib import Path

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.experimental import topologies

DATA = Path(__file__).resolve().parent / "data"
_CONFIG = re.compile(r", backend_config=\{.*\}$", re.MULTILINE)
_HERE = re.compile(r'"[^"]*record\.py"')


def lowered(devices):
    """train.py lowered for these devices, with its lines under the name `train.py`."""
    names = {}
    exec(compile((DATA / "train.py").read_text(), "train.py", "exec"), names)
    step, args, options = names["program"](np.array(devices))
    return jax.jit(step, **options).lower(*args)


def main():
    topology = topologies.get_topology_desc("v5p:2x2x2", platform="tpu")
    for platform, devices in (("cpu", jax.devices()), ("v5p", topology.devices)):
        text = _CONFIG.sub("", lowered(devices).compile().as_text())
        (DATA / f"train_{platform}_{jax.__version__}.hlo").write_text(_HERE.sub('"record.py"', text))
    text = lowered(jax.devices()).as_text(debug_info=True)
    (DATA / "train.mlir").write_text(_HERE.sub('"record.py"', text))


if __name__ == "__main__":
    main()
