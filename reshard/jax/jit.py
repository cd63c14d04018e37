"""`reshard.jax.jit`: `jax.jit`, with our collectives where they are better than what XLA would do.

A function is traced once, and its program is compiled twice, as it is and after the pass; the better one is
kept. Where the pass has nothing to do, or cannot do it, the program is compiled as it is, once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun

from reshard.errors import LayoutError, NetworkError
from reshard.jax import module_pass
from reshard.jax.compare import launch_bytes
from reshard.jax.module_pass import Options
from reshard.jax.partitioner_hook import as_constraints
from reshard.jax.pass_report import Report
from reshard.jax.stages import Attempt, Compiled, Lowered
from reshard.jax.strict import Limits, limits
from reshard.lower.to_stablehlo import Module
from reshard.synth import Network

_jax: Any = jax  # Its own stubs leave too much unknown.
_call_jaxpr: Any = jaxpr_as_fun
_PARTITIONS = "mhlo.num_partitions"


def jit(
    f: Callable[..., Any] | None = None,
    *,
    network: Network | str | None = None,
    budget: int | None = None,
    strict: bool = False,
    max_bytes: int | None = None,
    **options: Any,
) -> Any:
    """`jax.jit`, whose program moves data by our collectives wherever that makes it better.

    `options` are those of `jax.jit` (`in_shardings`, `out_shardings`, `static_argnums`, `donate_argnums`, ...).
    `network` and `budget` (bytes a device, for each move) are those of `reshard.plan`. With `strict`, a program that
    still gathers a whole array to move it raises `StrictError` when it is compiled; with `max_bytes`, one that needs
    more temporary memory on a device. Without a function, it is a decorator.

    What is returned is called, lowered and compiled as what `jax.jit` returns; `.lower(...).compile()` has a
    `decision` and a `report`. A program that is kept receives no more bytes on any device than the one that `jax.jit`
    makes, and needs no more temporary memory. Under another transformation (an outer `jit`, `grad`, `vmap`), where
    the program is only a part of one, it is plain `jax.jit`: put this one outermost.

    >>> double = jit(lambda x: 2 * x)
    >>> float(double(4.0)), double.lower(4.0).compile().decision.why
    (8.0, 'it runs on one device')
    """
    if f is None:
        given = {"network": network, "budget": budget, "strict": strict, "max_bytes": max_bytes}
        return functools.partial(jit, **given, **options)
    loaded = Network.load(network) if isinstance(network, str) else network
    return Jitted(f, options, Options(loaded, budget), Limits(not strict, max_bytes))


class Jitted:
    """What `jit` returns: a function that is compiled for each kind of arguments that it is called with."""

    def __init__(self, f: Callable[..., Any], jit_options: dict[str, Any], options: Options, limits: Limits) -> None:
        functools.update_wrapper(self, f)
        self._function = f
        self._plain = _jax.jit(f, **jit_options)
        self._jit_options = jit_options
        self._options = options
        self._limits = limits
        self._static = _static_arguments(f, jit_options)
        self._compiled: dict[Any, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(leaf, _jax.core.Tracer) for leaf in leaves) or _jax.config.jax_disable_jit:
            return self._plain(*args, **kwargs)
        traced = self._plain.trace(*args, **kwargs)
        # The trace of arguments of a kind is one object, as JAX caches it; where they lie is the rest of the key.
        key = (traced.jaxpr, limits(self._limits), *map(_place, leaves))
        if key not in self._compiled:
            self._compiled[key] = self._lowered(traced, args, kwargs).compile()
        found = self._compiled[key]
        if found.decision.chosen == "plain":
            with as_constraints():
                return self._plain(*args, **kwargs)
        dynamic, named = self._static.left_out(args, kwargs)
        return found(*dynamic, **named)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Not there yet, while it is made or unpickled.
            raise AttributeError(name)
        return getattr(self._plain, name)  # trace, eval_shape, clear_cache

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program for arguments, or for `jax.ShapeDtypeStruct`s with shardings, before and after the pass."""
        return self._lowered(self._plain.trace(*args, **kwargs), args, kwargs)

    def _lowered(self, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        plain = _lowered_as_it_is(traced)
        again = functools.partial(self._attempt, traced, *_abstract(args, kwargs))
        ours, why, failed, report = None, "", False, Report()
        if not _partitioned(plain.compiler_ir("stablehlo")):
            why = "it runs on one device"
        else:
            try:
                ours = again(frozenset())
                report = ours.report
                if not report.taken:
                    ours, why = None, "it has no reshard to take"
            except NetworkError:
                raise
            except Exception as error:  # Whatever it is, the plain program works.
                why, failed = f"the pass cannot do it: {type(error).__name__}: {error}", True
        return Lowered(plain, ours, why, failed, again, report, launch_bytes(self._options.network), self._limits)

    def _attempt(self, traced: Any, args: Any, kwargs: Any, leave: frozenset[str]) -> Attempt:
        """The pass on the program, lowered anew: JAX shares one lowering among all who ask, and ours is changed."""

        @functools.wraps(self._function)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves = _jax.tree.leaves(self._static.left_out(args, kwargs))
            return _jax.tree.unflatten(traced.out_tree, _call_jaxpr(traced.jaxpr)(*leaves))

        with as_constraints():
            lowered = _jax.jit(run, **self._jit_options).lower(*args, **kwargs)
        report = module_pass.run(lowered.compiler_ir("stablehlo"), self._options._replace(leave=leave))
        return Attempt(lowered, report)


class _Static(NamedTuple):
    """Which arguments are no arrays but part of the program."""

    numbers: frozenset[int]
    names: frozenset[str]

    def left_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without them."""
        if not self.numbers and not self.names:
            return args, kwargs
        numbers = {number % len(args) if args else number for number in self.numbers}
        dynamic = tuple(arg for at, arg in enumerate(args) if at not in numbers)
        return dynamic, {name: arg for name, arg in kwargs.items() if name not in self.names}


def _static_arguments(f: Callable[..., Any], options: dict[str, Any]) -> _Static:
    """The static arguments by number and by name; where one of the two is given, as `jax.jit` finds the other."""
    numbers, names = options.get("static_argnums"), options.get("static_argnames")
    numbers = None if numbers is None else {numbers} if isinstance(numbers, int) else set(numbers)
    names = None if names is None else {names} if isinstance(names, str) else set(names)
    both = _named_by_place(f)
    if numbers is None and names is not None:
        numbers = {at for at, name in enumerate(both) if name in names}
    elif names is None and numbers is not None:
        names = {both[number] for number in numbers if -len(both) <= number < len(both)}
    return _Static(frozenset(numbers or ()), frozenset(name for name in names or () if name))


def _named_by_place(f: Callable[..., Any]) -> list[str]:
    """The parameters' names, empty for those that cannot be given both by place and by name."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (ValueError, TypeError):  # A builtin has none.
        return []
    return [p.name if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else "" for p in parameters]


def _place(leaf: Any) -> Any:
    """Where an argument lies, None if that is open."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


def _lowered_as_it_is(traced: Any) -> Any:
    try:
        return traced.lower()
    except LayoutError:  # A `redistribute` whose source only the compiler finds: on TPU, XLA's own constraint.
        with as_constraints():
            return traced.lower()


def _abstract(args: Any, kwargs: Any) -> Any:
    """The arguments without their data, which a lowering that is kept would keep, too."""

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))  # Random keys have none.
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_place(leaf), weak_type=weak)

    return _jax.tree.map(abstract, (args, kwargs))


def _partitioned(module: Module) -> bool:
    attributes = module.operation.attributes
    return _PARTITIONS in attributes and int(attributes[_PARTITIONS].value) > 1
