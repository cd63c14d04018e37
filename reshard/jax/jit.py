"""`reshard.jax.jit`: `jax.jit`, with our collectives where they are better than XLA's choice.

It compiles with the pass inside XLA (`xla_pass`) switched on: there is one compilation, and the dispatch is that of
`jax.jit`. Each function has a switch of its own, which is part of the key of jax's caches, so that its programs never
mix with those of `jax.jit`.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.core import Tracer

from reshard.doctor.places import PassOutcome, Place
from reshard.jax.compiled import Compiled
from reshard.jax.doctor import checked_function, devices_of_program, drop_data, known_moves, placement_of
from reshard.jax.pass_report import Decision, PassReport, Reshard, describe_savings, module_figures, read_figures
from reshard.jax.strict import Limits, effective_limits, has_limits
from reshard.jax.xla_pass import xla_hook
from reshard.jax.xla_pass.fragments import JaxlibReader
from reshard.jax.xla_pass.xla_hook import Enabled, ModuleReport, Watched, prepare_pass
from reshard.synth import Network
from reshard.synth.options import read_budget
from reshard.types.whole import checked_flag


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
    limits = Limits(not checked_flag(strict, "strict"), read_budget(max_bytes, "max_bytes"))
    checked_function(f)
    return Jitted(f, options, prepare_pass(network, budget, prefer), limits)


class Jitted:
    """The result of `jit`: the function of `jax.jit`, whose programs go through the pass inside XLA.

    It is bound to instances as functions are, and has the attributes of the function of `jax.jit`.
    """

    def __init__(self, f: Callable[..., Any], jit_options: dict[str, Any], switched: Enabled, limits: Limits) -> None:
        functools.update_wrapper(self, f)
        self._plain: Any = jax.jit(f, **jit_options)
        self._switched = switched
        self._on, self._back = xla_hook.switch_functions()
        self._limits = limits
        self._limited = limits != Limits()
        self._accepted: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._limited or has_limits():
            self._check(args, kwargs)
        before = self._on(self._switched)
        try:
            return self._plain(*args, **kwargs)
        finally:
            self._back(before)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Before `__init__` has set it, as in copying and unpickling.
            raise AttributeError(name)
        return getattr(self._plain, name)  # trace, eval_shape, clear_cache

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program for arguments, or for `jax.ShapeDtypeStruct`s with shardings."""
        return self._lowered(self._trace(args, kwargs), args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with xla_hook.switched_on(self._switched):
            return self._plain.trace(*args, **kwargs)

    def _lowered(self, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        shapes, named = drop_data(args, kwargs)
        with xla_hook.switched_on(self._switched):
            lowered = traced.lower()
        return Lowered(lowered, self._switched, self._limits, lambda: self._plain.lower(*shapes, **named))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises `StrictError` if the program for these arguments exceeds the limits."""
        leaves = jax.tree.leaves((args, kwargs))
        if jax.config.jax_disable_jit or any(isinstance(leaf, Tracer) for leaf in leaves):
            return  # Such a call compiles nothing of its own.
        traced = self._trace(args, kwargs)
        key = (traced.jaxpr, effective_limits(self._limits), *map(placement_of, leaves))
        if key not in self._accepted:
            self._lowered(traced, args, kwargs).compile()
            self._accepted.add(key)


_MOST_REASONS = 3
_FIGURE = re.compile(r", \d+ B$")
_outcomes: WeakKeyDictionary[Any, tuple[Decision, PassReport]] = WeakKeyDictionary()  # by jax's executables


@dataclass(frozen=True, eq=False)
class Lowered:
    """A lowered program, `lowered` as JAX's own `jax.stages.Lowered`, which compiles with the pass.

    `again` lowers it anew: if jax has compiled the program already, the pass does not see it, so what the pass did is
    not known. What is not defined here is that of `lowered`.
    """

    lowered: Any
    switched: Enabled
    limits: Limits
    again: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "lowered":
            raise AttributeError(name)
        return getattr(self.lowered, name)  # as_text, compiler_ir, out_info, cost_analysis ...

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles the program, and raises `StrictError` if strict mode refuses it."""
        executable, decision, report = self._compiled(*args, **kwargs)
        limits = effective_limits(self.limits)
        if limits != Limits():
            report = replace(report, moves=tuple(known_moves(self.lowered.compiler_ir("stablehlo"))))
        compiled = Compiled(executable, decision, report)
        compiled.check(limits)
        return compiled

    def _compiled(self, *args: Any, **kwargs: Any) -> tuple[Any, Decision, PassReport]:
        with xla_hook.switched_on(self.switched), xla_hook.watch_modules() as watched:
            executable = self.lowered.compile(*args, **kwargs)
        held = _cached_executable(executable)
        if not watched and held in _outcomes:
            return executable, *_outcomes[held]
        if not watched and len(devices_of_program(executable)) > 1 and read_figures(executable).launches > 0:
            with xla_hook.switched_on(replace(self.switched, reports=[])), xla_hook.watch_modules() as watched:
                executable = self.again().compile(*args, **kwargs)
            held = _cached_executable(executable)
        outcome = _read_outcome(executable, watched)
        _outcomes[held] = outcome
        return executable, *outcome


def _read_outcome(executable: Any, watched: list[Watched]) -> tuple[Decision, PassReport]:
    """What the pass made of a program, and of each of its places."""
    after = read_figures(executable)
    if not watched:
        if len(devices_of_program(executable)) <= 1:
            return Decision("plain", "it runs on one device"), PassReport()
        if not after.launches:
            return Decision("plain", "it has no collectives", plain=after), PassReport()
        why = "jax's persistent cache had it, compiled with the pass; what was replaced then is not known"
        return Decision("reshard", why, ours=after), PassReport()
    module, report = watched[-1]
    places = PassReport(tuple(one for place in report.places for one in _list_reshards(place)))
    if not report.changed:
        return Decision("plain", _why_unchanged(report), bool(report.why), after), places
    before = module_figures(JaxlibReader().text(module))
    return Decision("reshard", describe_savings(before, after), False, before, after), places


def _list_reshards(place: Place) -> list[Reshard]:
    """The reshards of a place: one for each plan that took its place, or one that was left."""
    does, outcome = f"{place.does_with_op}, {place.received_bytes} B received", place.outcome or PassOutcome()
    layouts = [(plan.source, plan.target, plan) for plan in outcome.plans] or [(None, None, None)]
    return [
        Reshard(place.line, place.computation, False, *one, outcome.replaced, outcome.why, does=does) for one in layouts
    ]


def _why_unchanged(report: ModuleReport) -> str:
    """One sentence on why the pass replaced nothing, with the reasons by how many chains they hold for."""
    if report.why:
        return f"the pass cannot do it: {report.why}"
    if not report.places:
        return "it has no chain of collectives that could be replaced"
    reasons = Counter(_FIGURE.sub("", place.why_left) for place in report.places)
    listed = "; ".join(f"{count} of {len(report.places)}: {why}" for why, count in reasons.most_common(_MOST_REASONS))
    return f"none of its chains of collectives can be replaced: {listed}"


def _cached_executable(executable: Any) -> Any:
    """What jax caches of a compiled program; the `jax.stages.Compiled` around it is new each time."""
    return getattr(executable, "_executable", executable)
