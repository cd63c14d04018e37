"""reshard for JAX programs: `redistribute` moves arrays, in place of device_put and sharding constraints."""

from reshard.jax.redistribute import redistribute as redistribute
