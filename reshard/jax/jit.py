"""`reshard.jax.jit`: `jax.jit`, with the collectives of plans where they are better than XLA's; and strict mode.

It compiles with the pass inside XLA (`xla_pass`) switched on: there is one compilation, and the dispatch is that of
`jax.jit`. Each function has a switch of its own, which is part of the key of jax's caches, so that its programs never
mix with those of `jax.jit`.

Jitted, Lowered, Compiled    as of `jax.jit`, the last with what the pass did, and as bytes
strict, Limits               a compiled program that still rebuilds a whole array, or needs too much memory, is refused
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.core import Tracer
from jax.experimental import serialize_executable as _serialize_executable

from reshard.doctor import examine
from reshard.doctor.places import PassOutcome, format_array, shorten_line
from reshard.errors import ProgramError, StrictError, quoted
from reshard.jax.pass_report import Decision, PassReport, Reshard, describe_savings, module_figures, read_figures
from reshard.jax.program_report import checked_function, devices_of_program, known_moves, optimized_text
from reshard.jax.xla_pass import xla_hook
from reshard.jax.xla_pass.fragments import print_module
from reshard.jax.xla_pass.xla_hook import Enabled, Watched, prepare_pass
from reshard.synth import Network
from reshard.synth.options import read_budget
from reshard.types.layout import Layout
from reshard.types.whole import checked_flag

_serialize: Any = _serialize_executable
_FORM = "reshard program, form 1, jax"
_outcomes: WeakKeyDictionary[Any, tuple[Decision, PassReport]] = WeakKeyDictionary()  # by jax's executables


class Limits(NamedTuple):
    """What a compiled program may do: rebuild arrays or not, and use `max_bytes` of temporary memory per device."""

    rebuild: bool = True
    max_bytes: int | None = None


_UNLIMITED = Limits()  # One object: making another takes a twentieth of a small call.
_limits: ContextVar[Limits] = ContextVar("reshard_limits", default=_UNLIMITED)


def jit(
    f: Callable[..., Any] | None = None,
    *,
    network: Network | str | None = None,
    budget: int | str | None = None,
    prefer: str = "bytes",
    sums: str = "exact",
    strict: bool = False,
    max_bytes: int | str | None = None,
    **options: Any,
) -> Any:
    """`jax.jit`, whose program moves data by the collectives of plans wherever that makes it better.

    `options` are those of `jax.jit` (`in_shardings`, `out_shardings`, `static_argnums`, `donate_argnums`, ...).
    `network` and `budget` (bytes per device, for each move) are those of `reshard.plan`; `prefer` ("bytes",
    "memory" or "time") is that of `enable`: what plans must make better; `sums` ("exact" or "any order")
    is that of `enable`, too. With `strict`, compiling a program that still gathers a whole array to move it raises
    `StrictError`; with `max_bytes`, so does a program that needs more temporary memory on a device. Without `f`,
    the result is a decorator.

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
        ours: dict[str, Any] = {"network": network, "budget": budget, "prefer": prefer, "sums": sums}
        return functools.partial(jit, **ours, strict=strict, max_bytes=max_bytes, **options)
    limits = Limits(not checked_flag(strict, "strict"), read_budget(max_bytes, "max_bytes"))
    checked_function(f)
    return Jitted(f, options, prepare_pass(network, budget, prefer, sums=sums), limits)


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
        self._limited = limits != _UNLIMITED
        self._accepted: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._limited or _limits.get() != _UNLIMITED:
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
        with xla_hook.switched_on(self._switched):
            lowered = self._plain.trace(*args, **kwargs).lower()

        def without_data(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            weak = bool(getattr(leaf, "weak_type", False))  # Random keys have no such attribute.
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_placement_of(leaf), weak_type=weak)

        # Without their data, which a cached lowering would keep alive.
        shapes, named = jax.tree.map(without_data, (args, kwargs))
        return Lowered(lowered, self._switched, self._limits, lambda: self._plain.lower(*shapes, **named))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises `StrictError` if the program for these arguments exceeds the limits."""
        leaves = jax.tree.leaves((args, kwargs))
        if jax.config.jax_disable_jit or any(isinstance(leaf, Tracer) for leaf in leaves):
            return  # Such a call compiles nothing of its own.
        with xla_hook.switched_on(self._switched):
            traced = self._plain.trace(*args, **kwargs)
        key = (traced.jaxpr, effective_limits(self._limits), *map(_placement_of, leaves))
        if key not in self._accepted:
            self.lower(*args, **kwargs).compile()
            self._accepted.add(key)


def _placement_of(leaf: Any) -> Any:
    """The sharding of an argument; None if JAX is free to choose it."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


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
        with xla_hook.switched_on(self.switched), xla_hook.watch_modules() as watched:
            executable = self.lowered.compile(*args, **kwargs)
        # What jax caches of a compiled program; the `jax.stages.Compiled` around it is new each time.
        held = getattr(executable, "_executable", executable)
        if watched or held not in _outcomes:
            if not watched and len(devices_of_program(executable)) > 1 and read_figures(executable).launches > 0:
                with xla_hook.switched_on(replace(self.switched, reports=[])), xla_hook.watch_modules() as watched:
                    executable = self.again().compile(*args, **kwargs)
                held = getattr(executable, "_executable", executable)
            _outcomes[held] = _read_outcome(executable, watched)
        decision, report = _outcomes[held]
        limits = effective_limits(self.limits)
        if limits != _UNLIMITED:
            report = replace(report, moves=tuple(known_moves(self.lowered.compiler_ir("stablehlo"))))
            temp = int(executable.memory_analysis().temp_size_in_bytes)
            check_limits(optimized_text(executable), report, limits, temp)
        return Compiled(executable, decision, report)


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
    reshards: list[Reshard] = []
    for place in report.places:
        # One for each plan that took the place of the chain, or one that was left.
        does, outcome = f"{place.does_with_op}, {place.received_bytes} B received", place.outcome or PassOutcome()
        for one in [(plan.source, plan.target, plan) for plan in outcome.plans] or [(None, None, None)]:
            taken = outcome.replaced
            reshards.append(Reshard(place.line, place.computation, False, *one, taken, outcome.why, does=does))
    places = PassReport(tuple(reshards))
    if report.changed:
        before = module_figures(print_module(module))
        return Decision("reshard", describe_savings(before, after), False, before, after), places
    # One sentence, with the reasons by how many chains they hold for.
    reasons = Counter(place.why_left for place in report.places).most_common(3)
    listed = "; ".join(f"{count} of {len(report.places)}: {why}" for why, count in reasons)
    why = f"none of its chains of collectives can be replaced: {listed}"
    if report.why:
        why = f"the pass cannot do it: {report.why}"
    elif not report.places:
        why = "it has no chain of collectives that could be replaced"
    return Decision("plain", why, bool(report.why), after), places


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program; call it with the arguments that it was lowered for, without the static ones.

    `executable` is JAX's own `jax.stages.Compiled`, `decision` says whether plans' collectives run and why, and
    `report` what was done with each of the program's reshards. What is not defined here is that of `executable`.

    >>> from reshard.jax import jit
    >>> compiled = jit(lambda x: 2 * x).lower(4.0).compile()
    >>> float(compiled(5.0)), str(compiled.decision)
    (10.0, 'plain: it runs on one device')
    """

    executable: Any
    decision: Decision
    report: PassReport

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.executable(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "executable":  # Before `__init__` has set it.
            raise AttributeError(name)
        return getattr(self.executable, name)  # as_text, memory_analysis, cost_analysis, input_shardings ...

    def serialize(self) -> bytes:
        """The compiled program as bytes, for `deserialize` under the same jax on devices of the same kind."""
        devices = [device.id for device in devices_of_program(self.executable)]
        body = pickle.dumps((devices, *_serialize.serialize(self.executable), self.decision, self.report))
        return f"{_FORM} {jax.__version__} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def deserialize(data: bytes) -> Compiled:
    """The compiled program from the bytes of `Compiled.serialize`.

    A digest is checked before anything is read, so that damaged bytes are refused; but jax's own part is a pickle, so
    load only what you trust. It runs on the devices that it was compiled for. Raises `ProgramError` if the process does
    not have them, or if the bytes are not those of `serialize` under this version.

    >>> from reshard.jax import jit
    >>> data = jit(lambda x: 2 * x).lower(4.0).compile().serialize()
    >>> float(deserialize(data)(4.0))
    8.0
    """
    wrong = "the bytes are not those of a compiled program's serialize()"
    if not isinstance(data, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProgramError(f"{wrong}: {quoted(data)} is a {type(data).__name__}")
    head, _, body = bytes(data).partition(b"\n")
    form = re.fullmatch(rf"{_FORM} (\S+) (\w+)", head.decode("latin-1"))
    if form is None:
        raise ProgramError(f"{wrong}: they do not begin with {_FORM!r}")
    version, digest = form.groups()
    if digest != hashlib.sha256(body).hexdigest():  # XLA ends the process on machine code that is damaged.
        raise ProgramError(f"{wrong}: they are damaged, or not all of them are here")
    if version != jax.__version__:
        raise ProgramError(
            f"the program was compiled by jax {version}, and this is {jax.__version__}; compile it again"
        )
    try:
        ids, *parts, decision, report = pickle.loads(body)
    except Exception as error:  # Unpickling can raise anything.
        raise ProgramError(f"{wrong}: {error}") from None
    known = {device.id: device for device in jax.devices()}
    missing = [each for each in ids if each not in known]
    if missing:
        raise ProgramError(
            f"the program was compiled for devices {quoted(ids)}, and this process has no {quoted(missing)} among its "
            f"{len(known)}; load it where the devices have the same ids, or compile it again"
        )
    # JAX itself would load it for all devices of the process, and abort the process where these are more.
    loaded = _serialize.deserialize_and_load(*parts, execution_devices=[known[each] for each in ids])
    return Compiled(loaded, decision, report)


# ---- strict mode -----------------------------------------------------------------------------------


@contextmanager
def strict(*, max_bytes: int | str | None = None) -> Generator[None]:
    """A context in which `reshard.jax.jit` raises `StrictError` for a program that still rebuilds an array.

    A program rebuilds an array if every device comes to have all of it, and uses a part. That is what the doctor calls
    rebuilt; an array that is used as a whole is not, however it is gathered. With `max_bytes`, programs that need more
    temporary memory than that on a device (bytes, or text such as "64MiB") are refused, too. In nested contexts the
    tighter limits hold. Raises `PlanError` for a `max_bytes` that is not a number of bytes.

    >>> from reshard.jax import jit
    >>> with strict(max_bytes=1 << 20):
    ...     print(jit(lambda x: x + 1)(2.0))
    3.0
    """
    token = _limits.set(effective_limits(Limits(False, read_budget(max_bytes, "max_bytes"))))
    try:
        yield
    finally:
        _limits.reset(token)


def effective_limits(own: Limits) -> Limits:
    """The tighter of a function's own limits and those of the current context."""
    context = _limits.get()
    bounds = [bound for bound in (own.max_bytes, context.max_bytes) if bound is not None]
    return Limits(own.rebuild and context.rebuild, min(bounds, default=None))


def check_limits(text: str, report: PassReport, limits: Limits, temp_bytes: int = 0) -> None:
    """Raises `StrictError`, naming the user's line, if a compiled module exceeds the limits.

    `text` is the module's HLO, `temp_bytes` its temporary memory on a device. What is rebuilt is what the doctor says;
    the report gives the names of axes and lines.
    """
    for place in () if limits.rebuild else examine(text, known=report.known).rebuilt:
        where, move = place.where, place.rebuilt_move
        line = f"{where.file}:{where.line}" if where.exact and where.file else ""  # Else only one near it is known.
        ends = None
        if move is not None and move.source is not None and move.target is not None:
            ends = move.source, move.target
        array = "" if place.rebuilt is None else f" {format_array(place.rebuilt)}"
        what, how = f"the whole array{array}", "of which each uses a part"
        if ends is not None:
            what, how = f"the whole array of global shape {ends[0].shape}", f"to move it from {ends[0]} to {ends[1]}"
        # The pass may have left several reshards of this line to XLA: the reason is that of one between these layouts.
        same = (one for one in report.left if one.where == line and (one.does or _are_alike(one, ends)))
        why = next((one.why for one in same), "")
        names = ", ".join(collective.name for collective in place.collectives)
        raise StrictError(
            f"{line or where}: {what} is rebuilt on every device by {names} ({place.received_bytes} B received), {how}"
            + (f"; it was left to XLA: {why}" if why else "")
        )
    if limits.max_bytes is not None and temp_bytes > limits.max_bytes:
        reasons: dict[str, list[str]] = {}  # A reason may hold for every line of the program.
        for one in report.left:
            reasons.setdefault(one.why, []).append(shorten_line(one.where) or one.operation)
        rows = (f"\n  {len(at)} left, {why}: {', '.join([*dict.fromkeys(at)][:8])}" for why, at in reasons.items())
        raise StrictError(
            f"the program needs {temp_bytes} B of temporary memory on a device, and max_bytes allows "
            f"{limits.max_bytes} B; reshard.jax.report(f)(...).advise() looks for the shardings to change; reshards "
            f"taken: {len(report.taken)} of {len(report.taken) + len(report.left)}{''.join(rows)}"
        )


def _are_alike(reshard: Reshard, ends: tuple[Layout, Layout] | None) -> bool:
    """Whether a reshard has these layouts, in any dtype: XLA may convert before it sends."""
    if reshard.source is None or reshard.target is None or ends is None:
        return False
    return ends == tuple(replace(each, dtype=ends[0].dtype) for each in (reshard.source, reshard.target))
