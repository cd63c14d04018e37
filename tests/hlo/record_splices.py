"""Writes modules as XLA hands them to our pass, and what the pass splices in: `python record_splices.py`, with libtpu.

data/splices/NAME.pb            the serialized module; NAME.hlo its text
data/splices/NAME_0.pb, ...     the fragments
data/splices/NAME.json          for each fragment: region, source and uses

NAME is train (the program of tests/doctor/data/train.py) or scan (the same move in the body of a loop), with the
platform.
"""

import json
import os
from pathlib import Path

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.experimental import topologies

from reshard.hlo import wire
from reshard.hlo.splice import Splicer
from reshard.jax.xla_pass import hlo_pass, xla_hook

_STACK_FRAMES = 17
jax.config.update("jax_traceback_in_locations_limit", 1)  # The lines of the program, without those of this script.
HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "splices"
SCAN = """
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def program(devices):
    mesh = Mesh(devices.reshape(2, 4), ("y", "x"))
    before, after = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))

    def step(a):
        def turn(carry, _):
            moved = jax.lax.with_sharding_constraint(carry * 2, after)
            return jax.lax.with_sharding_constraint(moved + 1, before), None

        return jax.lax.scan(turn, a, None, length=3)[0]

    return step, [jax.ShapeDtypeStruct((64, 64, 64), jnp.float32, sharding=before)], {}
"""


def lowered(source, devices):
    names = {}
    exec(compile(source, "train.py", "exec"), names)
    step, args, options = names["program"](np.array(devices))
    return jax.jit(step, **options).lower(*args)


def record(name, source, devices):
    improve, splice = hlo_pass.improve_module, Splicer.splice
    modules, changes = [], []

    def improving(module, fragments, compiler, options):
        modules.append((module, compiler.text(module)))
        return improve(module, fragments, compiler, options)

    def splicing(splicer, change):
        changes.append(change)
        return splice(splicer, change)

    xla_hook.improve_module, Splicer.splice = improving, splicing
    with xla_hook.enabled() as log:
        lowered(source, devices).compile()
    xla_hook.improve_module, Splicer.splice = improve, splice
    print(log)
    (module, text), *_ = modules
    (DATA / f"{name}.pb").write_bytes(module)
    (DATA / f"{name}.hlo").write_text(text)
    for at, change in enumerate(changes):
        fragment = wire.decode_message(change.fragment)
        fragment.remove(_STACK_FRAMES)  # They name files of this machine, and a splice does not take them over.
        (DATA / f"{name}_{at}.pb").write_bytes(wire.encode_message(fragment))
    described = [
        {"region": one.region, "source": one.sources[0], "uses": [[list(use.path), use.name] for use in one.uses]}
        for one in changes
    ]
    (DATA / f"{name}.json").write_text(json.dumps(described, indent=1) + "\n")


def main():
    DATA.mkdir(exist_ok=True)
    train = (HERE.parent / "doctor" / "data" / "train.py").read_text()
    topology = topologies.get_topology_desc("v5p:2x2x2", platform="tpu")
    for platform, devices in (("cpu", jax.devices()), ("v5p", topology.devices)):
        record(f"train_{platform}", train, devices)
        record(f"scan_{platform}", SCAN, devices)


if __name__ == "__main__":
    main()
