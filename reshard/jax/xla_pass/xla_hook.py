"""`enable`, `disable` and `enabled`: our pass in XLA, for every program that this process compiles.

XLA calls the pass with each module after SPMD partitioning, and compiles what it returns. Nothing
else about `jax.jit` changes: one compilation, its own dispatch. Whether the pass is on is part of the key of jax's own
caches, so a program that was compiled without it is compiled anew with it, and the other way round.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from reshard.doctor.places import Place
from reshard.doctor.proposals import ProposalOptions
from reshard.errors import ProgramError
from reshard.jax.request import options_on
from reshard.jax.xla_pass import fragments, persistent_cache, program_peaks
from reshard.jax.xla_pass.fragments import Fragments
from reshard.jax.xla_pass.hlo_pass import has_collectives, improve_module
from reshard.jax.xla_pass.program_peaks import Again, ProgramPeaks
from reshard.synth import Network, PlanOptions

_log = logging.getLogger("reshard")
_NAME = "reshard"
_PRE_SCHEDULER = 0
_PLUGINS = ("tpu", "cuda", "rocm")
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_FRAMES = 16
_jax: Any = jax


@dataclass(frozen=True)
class ModuleReport:
    """What the pass did with one module: its name, the place of each chain of collectives, and the seconds it took."""

    module: str
    places: tuple[Place, ...]
    seconds: float
    changed: bool
    why: str = ""

    @property
    def replaced(self) -> tuple[Place, ...]:
        """The chains that plans took the place of."""
        return tuple(place for place in self.places if place.replaced)

    @property
    def saved_bytes(self) -> int:
        """The bytes that a device receives less, in one run of each replaced chain."""
        return sum(place.received_bytes - (place.planned_bytes or 0) for place in self.replaced)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "module": self.module,
            "changed": self.changed,
            "why": self.why,
            "saved_bytes": self.saved_bytes,
            "chains": [place.to_pass_dict() for place in self.places],
        }

    def __str__(self) -> str:
        if self.why:
            return f"{self.module}: left as it was, {self.why}"
        head = f"{self.module}: {len(self.replaced)} of {len(self.places)} chains replaced"
        return "\n".join([head, *(f"  {place}" for place in self.places)])


@dataclass(eq=False)
class Enabled:
    """The pass as it is switched on: its options, and a report of each module that had collectives since then."""

    options: ProposalOptions
    reports: list[ModuleReport] = field(default_factory=list[ModuleReport])

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports)) or "no module with collectives has been compiled yet"


class Watched(NamedTuple):
    """A module as XLA handed it to the pass, and the pass's report."""

    module: bytes
    report: ModuleReport


class _State:
    """What is registered with XLA, and the fragments compiled so far; one for the process."""

    def __init__(self) -> None:
        self.context: Any = None
        self.registered: set[str] = set()
        self.fragments: dict[tuple[Any, ...], Fragments] = {}
        self.lock = threading.Lock()


_state = _State()
_watching = threading.local()


def enable(*, network: Network | str | None = None, budget: int | str | None = None, prefer: str = "bytes") -> Enabled:
    """Switches the pass on for the process: every program compiled from now on is improved.

    `network` and `budget` (bytes per device, for each move) are those of `reshard.plan`; without a `network` plans are
    made for that of the devices, if it is known, and "none" is for none. `prefer` says what a plan
    must make better, and never makes another worse: fewer "bytes", less "memory" or less "time", with no more bytes.
    Returns the reports of what is compiled.
    Raises `PlanError` or `NetworkError` for invalid options.

    >>> log = enable()
    >>> disable()
    """
    switched = prepare_pass(network, budget, prefer)
    _state.context.set_global(switched)
    return switched


def disable() -> None:
    """Switches the pass off again; does nothing if it is off.

    >>> log = enable()
    >>> disable()
    >>> is_on()
    False
    """
    if _state.context is not None:
        _state.context.set_global(None)


@contextmanager
def enabled(
    *, network: Network | str | None = None, budget: int | str | None = None, prefer: str = "bytes"
) -> Generator[Enabled]:
    """A context in which this thread compiles with the pass; see `enable`.

    >>> with enabled() as log:
    ...     print(jax.jit(lambda x: x + 1)(2.0))
    3.0
    >>> print(log)
    no module with collectives has been compiled yet
    """
    switched = prepare_pass(network, budget, prefer)
    with _state.context(switched):
        yield switched


def is_on() -> bool:
    """Whether programs that this thread compiles now go through the pass."""
    return _state.context is not None and _state.context.value is not None


@contextmanager
def switched_on(switched: Enabled) -> Generator[None]:
    """A context in which this thread compiles with the pass, as prepared."""
    with _state.context(switched):
        yield


def switch_functions() -> tuple[Callable[[Enabled], Any], Callable[[Any], None]]:
    """The functions that switch a prepared pass on in this thread, and back to what the first has returned.

    They cost a fraction of what a context manager does, for code that runs at each call of a function.
    """
    config = _state.context._obj
    return config.swap_local, config.set_local


@contextmanager
def watch_modules() -> Generator[list[Watched]]:
    """A context that lists the modules with collectives that this thread compiles with the pass."""
    before = getattr(_watching, "into", None)
    _watching.into = watched = list[Watched]()
    try:
        yield watched
    finally:
        _watching.into = before


def prepare_pass(network: Network | str | None, budget: int | str | None, prefer: str = "bytes") -> Enabled:
    """The pass with these options, registered with XLA, but on only inside `switched_on` and `switch_functions`."""
    options = ProposalOptions(PlanOptions.read(budget, network, prefer=prefer))
    _prepare_hook()
    return Enabled(options)


def on_platform(options: ProposalOptions, devices: Sequence[Any]) -> ProposalOptions:
    """The options with the network of the devices that a program is compiled for, if the caller named none."""
    return options._replace(plan=options_on(devices, options.plan))


def _prepare_hook() -> None:
    """Registers the pass, once; where a platform's plugin is not loaded yet, when a program has been lowered."""
    with _state.lock:
        if _state.context is None:
            _state.context = _jax.make_user_context(None)
            persistent_cache.adapt_cache(_cache_key, fragments.is_capturing)
            _jax.monitoring.register_event_duration_secs_listener(_on_event)
    _register_pass()


def _on_event(event: str, *_: Any, **__: Any) -> None:
    if event == _LOWERED and _state.context.value is not None:
        _register_pass()


def _register_pass() -> None:
    """Registers the pass with every platform that is loaded and does not have it."""
    native, calls = _import_jaxlib("_jax"), _import_jaxlib("_xla")
    with _state.lock:
        if "cpu" not in _state.registered:
            calls.register_xla_transform(_NAME, _PRE_SCHEDULER, _on_module)
            _state.registered.add("cpu")
        for platform in _PLUGINS:
            if platform in _state.registered:
                continue
            try:
                calls.register_xla_transform_c_api(native.get_pjrt_plugin(platform), _NAME, _PRE_SCHEDULER, _on_module)
            except Exception:  # The plugin is not there, or not yet.
                continue
            _state.registered.add(platform)


def _import_jaxlib(module: str) -> Any:
    """One of jaxlib's own modules, which have no public names and no stubs."""
    return importlib.import_module(f"jaxlib.{module}")


def _cache_key() -> str:
    """What the pass adds to the keys of jax's persistent cache."""
    switched = _state.context.value
    return "" if switched is None else f" reshard {persistent_cache.digest_source()} {switched.options}"


def _on_module(module: bytes) -> bytes | None:
    """Called by XLA with each module that it compiles; never raises."""
    try:
        if fragments.capture_module(module):
            return None
        if (handed := program_peaks.answer_to_xla(module)) is not None:
            return handed.module
        switched: Enabled | None = _state.context.value
        if switched is None:
            return None
        compilation = _find_compilation()
        if (compilation is not None and len(compilation.devices) == 1) or not has_collectives(module):
            return None
        return _improve_and_report(module, compilation, switched)
    except BaseException:  # XLA would fail the user's compilation.
        _log.exception("the pass failed; the module stays as it was")
        return None


def _improve_and_report(module: bytes, compilation: _Compilation | None, switched: Enabled) -> bytes | None:
    started = time.perf_counter()
    try:
        if compilation is None:
            raise ProgramError("it is not known which devices the program is compiled for")
        known = fragments_of(compilation.devices)
        again = compilation.again
        peaks = None if again is None else ProgramPeaks(module, again, known.program_peaks)
        options = on_platform(switched.options, compilation.devices)
        improved = improve_module(module, known, options, peaks)
        better = improved.module
        report = ModuleReport(improved.name, improved.places, time.perf_counter() - started, better is not None)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        report, better = ModuleReport("module", (), time.perf_counter() - started, False, reason), None
        _log.debug("the module stays as it was", exc_info=True)
    _log.info("%s", report)
    switched.reports.append(report)
    if (into := getattr(_watching, "into", None)) is not None:
        into.append(Watched(bytes(module), report))
    return better


class _Compilation(NamedTuple):
    """The compilation that called the pass: its devices in order, and how to repeat it (None if that is not known)."""

    devices: Sequence[Any]
    again: Again | None


def _find_compilation() -> _Compilation | None:
    """What the compilation that called the pass is for.

    XLA does not tell its passes. jax's function that compiles has it, and is one of our callers.
    """
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_locals.get("executable_devices") is not None:
            return _Compilation(
                list(frame.f_locals["executable_devices"]), _repeat_compilation(frame.f_code.co_name, frame.f_locals)
            )
        frame = frame.f_back
    return None


def _repeat_compilation(name: str, given: Mapping[str, Any]) -> Again | None:
    """Repeats a call of jax's function that compiles; None if this is not that function, or it calls the host."""
    repeat: Any = getattr(importlib.import_module("jax._src.compiler"), name, None)
    names = ("backend", "module", "executable_devices", "options", "host_callbacks")
    if repeat is None or any(each not in given for each in names) or given["host_callbacks"]:
        return None
    arguments = {each: given[each] for each in names}
    return lambda: repeat(**arguments)


def fragments_of(devices: Sequence[Any]) -> Fragments:
    """The fragments for these devices; devices of equal topologies are equal."""
    key = tuple(_device_identity(device) for device in devices)
    with _state.lock:
        if key not in _state.fragments:
            _state.fragments[key] = Fragments(devices)
        return _state.fragments[key]


def _device_identity(device: Any) -> tuple[Any, ...]:
    coordinates = getattr(device, "coords", None)
    return (
        device.platform, device.device_kind, device.id, device.process_index,
        tuple(coordinates) if coordinates is not None else None,
    )  # fmt: skip
