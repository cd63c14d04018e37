"""`Jitted`: the result of `jit` where XLA has no hook for the pass, so that it works on the StableHLO.

A function is traced once, and its program is compiled twice, before and after the pass; the better one is kept. If the
pass finds nothing to do, or fails, the plain program is compiled, once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun

from reshard.errors import LayoutError, NetworkError
from reshard.jax.compiled import Compiled
from reshard.jax.doctor import abstract, placement_of
from reshard.jax.partitioner_hook import as_constraints
from reshard.jax.pass_report import PassReport
from reshard.jax.stablehlo_pass import module_pass
from reshard.jax.stablehlo_pass.lowered import Attempt, Lowered
from reshard.jax.stablehlo_pass.module_pass import PassOptions
from reshard.jax.strict import Limits, effective_limits
from reshard.jax.wrapped_jit import WrappedJit, is_another_program
from reshard.lower.to_stablehlo import Module
from reshard.synth.network import launch_bytes

_jax: Any = jax  # Its own stubs leave too much unknown.
_call_jaxpr: Any = jaxpr_as_fun
_PARTITIONS = "mhlo.num_partitions"


class Jitted(WrappedJit):
    """The result of `jit` without the hook: compiled once for each combination of shapes, dtypes and shardings."""

    def __init__(
        self, f: Callable[..., Any], jit_options: dict[str, Any], options: PassOptions, limits: Limits
    ) -> None:
        super().__init__(f, jit_options)
        self._function = f
        self._jit_options = jit_options
        self._options = options
        self._limits = limits
        self._static = _static_arguments(f, jit_options)
        self._compiled: dict[Any, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        if is_another_program(leaves):
            return self._plain(*args, **kwargs)
        traced = self._plain.trace(*args, **kwargs)
        # JAX caches traces, so arguments of equal types share one jaxpr object; their shardings complete the key.
        key = (traced.jaxpr, effective_limits(self._limits), *map(placement_of, leaves))
        if key not in self._compiled:
            self._compiled[key] = self._lowered(traced, args, kwargs).compile()
        compiled = self._compiled[key]
        if compiled.decision.chosen == "plain":
            with as_constraints():
                return self._plain(*args, **kwargs)
        dynamic, named = self._static.remove(args, kwargs)
        return compiled(*dynamic, **named)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program for arguments, or for `jax.ShapeDtypeStruct`s with shardings, before and after the pass."""
        return self._lowered(self._plain.trace(*args, **kwargs), args, kwargs)

    def _lowered(self, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        plain = _plain_lowered(traced)
        retry = functools.partial(self._attempt, traced, *abstract(args, kwargs))
        ours, why, failed, report = None, "", False, PassReport()
        if not _partitioned(plain.compiler_ir("stablehlo")):
            why = "it runs on one device"
        else:
            try:
                ours = retry(frozenset())
                report = ours.report
                if not report.taken:
                    ours, why = None, "it has no reshard to take"
            except NetworkError:
                raise
            except Exception as error:  # Whatever failed, the plain program works.
                why, failed = f"the pass cannot do it: {type(error).__name__}: {error}", True
        launch = launch_bytes(self._options.network)
        return Lowered(plain, ours, why, failed, retry, report, launch, self._limits, self._options.prefer)

    def _attempt(self, traced: Any, args: Any, kwargs: Any, leave: frozenset[str]) -> Attempt:
        """Applies the pass to a lowering of its own, because JAX caches lowerings and the pass changes the module."""

        @functools.wraps(self._function)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves = _jax.tree.leaves(self._static.remove(args, kwargs))
            return _jax.tree.unflatten(traced.out_tree, _call_jaxpr(traced.jaxpr)(*leaves))

        with as_constraints():
            lowered = _jax.jit(run, **self._jit_options).lower(*args, **kwargs)
        options = self._options._replace(leave=leave, platform=_platform(_jax.tree.leaves((args, kwargs))))
        report = module_pass.run(lowered.compiler_ir("stablehlo"), options)
        return Attempt(lowered, report)


def _platform(leaves: Sequence[Any]) -> str:
    """The platform that a program for these arguments runs on: theirs, or the default one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    devices = (device for sharding in shardings if sharding is not None for device in sharding.device_set)
    return next((device.platform for device in devices), _jax.default_backend())


class _StaticArguments(NamedTuple):
    """The arguments that are compiled into the program, by number and by name."""

    numbers: frozenset[int]
    names: frozenset[str]

    def remove(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The dynamic arguments: those that a compiled program takes."""
        if not self.numbers and not self.names:
            return args, kwargs
        numbers = {number % len(args) for number in self.numbers if -len(args) <= number < len(args)}
        dynamic = tuple(arg for at, arg in enumerate(args) if at not in numbers)
        return dynamic, {name: arg for name, arg in kwargs.items() if name not in self.names}


def _static_arguments(f: Callable[..., Any], options: dict[str, Any]) -> _StaticArguments:
    """The static arguments by number and by name; if only one is given, `jax.jit` derives the other, and so do we.

    For example, `static_argnums=1` of `f(v, n)` makes `f(v, n=3)` static in `n`, too.
    """
    numbers: Any = options.get("static_argnums")
    names: Any = options.get("static_argnames")
    parameters = _parameters(f)
    if numbers is None and names is not None:
        numbers = [at for at, name in enumerate(parameters) if name in _listed(names)]
    elif names is None and numbers is not None:
        names = [parameters[at] for at in _listed(numbers) if -len(parameters) <= at < len(parameters)]
    return _StaticArguments(frozenset(_listed(numbers)), frozenset(name for name in _listed(names) if name))


def _listed(option: Any) -> list[Any]:
    """The items of an option of `jax.jit` that is None, one item or several."""
    if option is None:
        return []
    return [option] if isinstance(option, int | str) else list(option)


def _parameters(f: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, "" for those that cannot be given both by position and by name."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (ValueError, TypeError):  # A builtin without a signature.
        return []
    return [p.name if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else "" for p in parameters]


def _plain_lowered(traced: Any) -> Any:
    try:
        return traced.lower()
    except LayoutError:  # TPU has no hook for a `redistribute` of unknown source: use XLA's own constraint.
        with as_constraints():
            return traced.lower()


def _partitioned(module: Module) -> bool:
    attributes = module.operation.attributes
    return _PARTITIONS in attributes and int(attributes[_PARTITIONS].value) > 1
