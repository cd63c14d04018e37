"""`reshard.jax.jit`: `jax.jit`, with our collectives where they are better than XLA's choice.

With jax 0.11 or later the pass works inside XLA, on the one program that `jax.jit` compiles: see `xla_pass.jitted`.
With an older jax it works on the StableHLO, and the program is compiled before and after it: see
`stablehlo_pass.jitted`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from reshard.jax.arguments import checked_function
from reshard.jax.stablehlo_pass.jitted import Jitted
from reshard.jax.stablehlo_pass.module_pass import pass_options
from reshard.jax.strict import Limits
from reshard.jax.xla_pass.jitted import JittedInXla
from reshard.jax.xla_pass.xla_hook import hook_exists, prepared
from reshard.synth import Network
from reshard.synth.planner import bytes_of
from reshard.types.flags import checked_flag


def jit(
    f: Callable[..., Any] | None = None,
    *,
    network: Network | str | None = None,
    budget: int | str | None = None,
    prefer: str = "bytes",
    strict: bool = False,
    max_bytes: int | str | None = None,
    **options: Any,
) -> Any:
    """`jax.jit`, whose program moves data by our collectives wherever that makes it better.

    `options` are those of `jax.jit` (`in_shardings`, `out_shardings`, `static_argnums`, `donate_argnums`, ...).
    `network` and `budget` (bytes per device, for each move) are those of `reshard.plan`; `prefer` ("bytes", "memory" or
    "time") is that of `enable`: what our collectives must make better. With `strict`, compiling a
    program that still gathers a whole array to move it raises `StrictError`; with `max_bytes`, so does a program that
    needs more temporary memory on a device. Without `f`, the result is a decorator.

    The result is called, lowered and compiled like that of `jax.jit`; `.lower(...).compile()` also has a `decision` and
    a `report`. No device receives more bytes than in the program of `jax.jit`. Under another transformation (an outer
    `jit`, `grad`, `vmap`) it is plain `jax.jit`, because the whole program is not known there: make this one the
    outermost.

    >>> double = jit(lambda x: 2 * x)
    >>> float(double(4.0)), double.lower(4.0).compile().decision.why
    (8.0, 'it runs on one device')

    As a decorator, with options of both:

    >>> @jit(static_argnames="times", strict=True)
    ... def scale(x, times):
    ...     return times * x
    >>> float(scale(4.0, times=3))
    12.0
    """
    if f is None:
        ours: dict[str, Any] = {"network": network, "budget": budget, "prefer": prefer}
        return functools.partial(jit, **ours, strict=strict, max_bytes=max_bytes, **options)
    limits = Limits(not checked_flag(strict, "strict"), bytes_of(max_bytes, "max_bytes"))
    checked_function(f)
    if hook_exists():
        return JittedInXla(f, options, prepared(network, budget, prefer), limits)
    return Jitted(f, options, pass_options(network, budget, prefer), limits)
