"""reshard for JAX programs.

`redistribute` moves arrays, in place of `device_put` and sharding constraints; `jit` is `jax.jit` with a pass over
the whole program, `transform` that pass on a module; `report` says where a function's data is resharded, and
`strict` refuses programs that rebuild an array to do so.
"""

from reshard.jax.doctor import report as report
from reshard.jax.jit import jit as jit
from reshard.jax.module_pass import transform as transform
from reshard.jax.redistribute import redistribute as redistribute
from reshard.jax.stages import deserialize as deserialize
from reshard.jax.strict import strict as strict
