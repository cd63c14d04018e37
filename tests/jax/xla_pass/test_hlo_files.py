"""The pass on HLO in files: the module that comes out is valid for XLA, keeps its constants, and receives less."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reshard import hlo
from reshard.errors import ProgramError
from reshard.hlo.proto import ModuleProto
from reshard.jax.doctor import optimized_text
from reshard.jax.xla_pass.hlo_files import improve_hlo
from tests.jax.moving import AFTER, numbered

TABLE = np.linspace(-1, 1, 16).astype("float32")


def step(v: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(v * 2, AFTER) + jnp.asarray(TABLE)


def test_text_and_proto_become_the_same_better_module() -> None:
    compiled = jax.jit(step).lower(numbered()).compile()
    text = optimized_text(compiled)
    proto = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    ours = [improve_hlo(text), improve_hlo(proto, devices=8)]
    for one in ours:
        traffic = hlo.traffic(hlo.parse(one.text))
        assert (traffic.received_bytes, traffic.launches) == (1792, 1)
        assert one.unscheduled and ModuleProto.decode(one.proto).schedule is None
        assert "{...}" not in one.text and str(TABLE[3])[:8] in one.text
        assert improve_hlo(one.text).proto  # what comes out can be read again, and has nothing to gain
        assert not any(place.replaced for place in improve_hlo(one.text).places)
    assert ours[0].to_dict()["chains"] == ours[1].to_dict()["chains"]
    for devices, message in [(-1, "1 or more"), (3, "has 8 partitions")]:
        with pytest.raises(ProgramError, match=message):
            improve_hlo(text, devices=devices)
