"""`enable`, `disable` and `enabled`: the pass inside XLA, for every program that this process compiles.

XLA calls the pass with each module after SPMD partitioning, and compiles what it returns. Nothing
else about `jax.jit` changes: one compilation, its own dispatch. Whether the pass is on is part of the key of jax's own
caches, so a program that was compiled without it is compiled anew with it, and the other way round.

jax's persistent cache knows nothing of the pass, and a program that it hands out is not compiled, so that it never
comes to the pass. So programs compiled with the pass are not mixed with others, or with those of another version of the
pass; and what is compiled only for the pass to see does not come from the cache.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.metadata
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from reshard import errors
from reshard.doctor.places import Place
from reshard.doctor.proposals import ProposalOptions, read_sums
from reshard.errors import PlanError, ProgramError, name_arguments
from reshard.hlo import wire
from reshard.jax import compiled_forms
from reshard.jax.request import options_on
from reshard.jax.xla_pass import fragments, program_peaks
from reshard.jax.xla_pass.fragments import Fragments
from reshard.jax.xla_pass.hlo_pass import has_collectives, improve_module
from reshard.jax.xla_pass.measured_programs import Compile, stop_compilation
from reshard.jax.xla_pass.program_peaks import ProgramPeaks
from reshard.synth import Network, PlanOptions
from reshard.synth.options import PREFERENCES

_log = logging.getLogger("reshard")
_NAME = "reshard"
_PRE_SCHEDULER, _POST_SCHEDULER = 0, 1
_PLUGINS = ("tpu", "cuda", "rocm")
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_FRAMES = 16
_MOST_KEPT = 32  # outcomes of modules, a few MB each
_PACKAGE = Path(errors.__file__).resolve().parent
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
            "reorder_bytes": sum(place.reorder_bytes for place in self.places),
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

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        disable()

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


@name_arguments
def enable(
    *,
    network: Network | str | None = None,
    budget: int | str | None = None,
    prefer: str = "bytes",
    same_bits: bool = False,
    sums: str = "exact",
) -> Enabled:
    """Switches the pass on for the process: every program compiled from now on is improved.

    `network` and `budget` (bytes per device, for each move) are those of `reshard.plan`; without a `network` plans are
    made for that of the devices, if it is known, and "none" is for none. `prefer` says what a plan
    must make better, and never makes another worse: fewer "bytes", less "memory" or less "time", with no more bytes.
    No program receives more bytes or has a higher peak, as the compiler says. Functions that were compiled before are
    compiled anew when they are called with the pass on.

    Data that is moved keeps its bits everywhere. Sums of floats are added up in the same order on CPU, and stay as they
    are where several processes share it; TPUs and GPUs promise no order. What is computed by the fusion that took a
    slice, and an FFT on other rows, may be rounded in another way, unless `same_bits`: then such chains are left, and
    on TPU and GPU all of them. With `sums="any order"`, floats may be added up in another order where that saves bytes.
    Returns the reports of what is compiled; as a context, `with enable():`, it switches the pass off at the end, for
    the whole process (`enabled` is for one thread). Raises `PlanError`, `NetworkError` or `ReshardError` for invalid
    options.

    >>> log = enable()
    >>> disable()
    """
    switched = prepare_pass(network, budget, prefer, same_bits, sums)
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
    *,
    network: Network | str | None = None,
    budget: int | str | None = None,
    prefer: str = "bytes",
    same_bits: bool = False,
    sums: str = "exact",
) -> Generator[Enabled]:
    """A context in which this thread compiles with the pass; see `enable`.

    >>> with enabled() as log:
    ...     print(jax.jit(lambda x: x + 1)(2.0))
    3.0
    >>> print(log)
    no module with collectives has been compiled yet
    """
    switched = prepare_pass(network, budget, prefer, same_bits, sums)
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


def prepare_pass(
    network: Network | str | None,
    budget: int | str | None,
    prefer: str = "bytes",
    same_bits: bool = False,
    sums: str = "exact",
) -> Enabled:
    """The pass with these options, registered with XLA, but on only inside `switched_on` and `switch_functions`.

    Where a platform's plugin is not loaded yet, it is registered there when a program has been lowered.
    """
    if prefer is None:  # pyright: ignore[reportUnnecessaryComparison]  # A plan has no preference; the pass has one.
        raise PlanError(f"prefer=None is none of {', '.join(map(repr, PREFERENCES))}")
    options = ProposalOptions(
        PlanOptions.read(budget, network, prefer=prefer), same_bits=same_bits, sums=read_sums(sums, same_bits)
    )
    with _state.lock:
        if _state.context is None:
            _state.context = _jax.make_user_context(None)
            _adapt_cache()

            def on_event(event: str, *_: Any, **__: Any) -> None:
                if event == _LOWERED and _state.context.value is not None:
                    _register_pass()

            _jax.monitoring.register_event_duration_secs_listener(on_event)
    _register_pass()
    return Enabled(options)


def _register_pass() -> None:
    """Registers the pass with every platform that is loaded and does not have it."""
    # jaxlib's own modules, which have no public names and no stubs.
    native, calls = importlib.import_module("jaxlib._jax"), importlib.import_module("jaxlib._xla")
    with _state.lock:
        if "cpu" not in _state.registered:
            calls.register_xla_transform(_NAME, _PRE_SCHEDULER, _on_module)
            calls.register_xla_transform(f"{_NAME}-stop", _POST_SCHEDULER, stop_compilation)
            _state.registered.add("cpu")
        for platform in _PLUGINS:
            if platform in _state.registered:
                continue
            try:
                calls.register_xla_transform_c_api(native.get_pjrt_plugin(platform), _NAME, _PRE_SCHEDULER, _on_module)
            except Exception:  # The plugin is not there, or not yet.
                continue
            _state.registered.add(platform)


# ---- jax's persistent cache ------------------------------------------------------------------------


@cache
def digest_source() -> str:
    """What tells this version of the pass from any other: a digest of the package's source, read once in a process.

    The version number stays as it is while the code changes, and the times of files differ between machines that share
    a cache. Without source files it is the version number after all.
    """
    digest, files = hashlib.blake2b(digest_size=8), sorted(_list_source_files())
    for name in files:  # Not as a `Path`: that takes three times as long.
        with open(os.path.join(_PACKAGE, name), "rb", buffering=0) as file:
            source = file.read()
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest() if files else importlib.metadata.version("reshard")


def _list_source_files() -> Iterator[str]:
    """The files of the package's source, by their paths inside it."""
    for folder, _, names in os.walk(_PACKAGE):
        inside = os.path.relpath(folder, _PACKAGE)
        yield from (os.path.join(inside, name) for name in names if name.endswith(".py"))


def _adapt_cache() -> None:
    """Makes the pass part of the keys of the cache, and leaves it out for fragments: both are asked at each
    compilation. It changes functions of jax, once in a process.
    """
    try:
        from jax._src import cache_key, compilation_cache  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        return
    keys: Any = cache_key
    store: Any = compilation_cache
    own_key, own_use = getattr(keys, "custom_hook", str), getattr(store, "is_cache_used", None)

    def custom_hook() -> str:
        switched = None if compiled_forms.is_asking() else _state.context.value
        return own_key() + ("" if switched is None else f" reshard {digest_source()} {switched.options}")

    def is_cache_used(*backend: Any) -> bool:
        return not fragments.is_capturing() and own_use is not None and own_use(*backend)

    keys.custom_hook, store.is_cache_used = custom_hook, is_cache_used


# ---- what XLA calls --------------------------------------------------------------------------------


def _on_module(module: bytes) -> bytes | None:
    """Called by XLA with each module that it compiles; never raises."""
    try:
        if fragments.capture_module(module) or compiled_forms.is_asking():
            return None
        if (handed := program_peaks.answer_to_xla(module)) is not None:
            return handed[0]
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
        peaks = None if again is None else ProgramPeaks(module, again, known.program_peaks, known.platform)
        options = switched.options
        # On the network of the devices that the program is compiled for, if the caller named none.
        options = options._replace(plan=options_on(compilation.devices, options.plan))
        # A module that was improved before, to the byte but for its number, is not searched again.
        key = program_peaks.digest_module(module, with_lines=True), options, known.processes, peaks is None
        improved = known.outcomes.get(key)
        if improved is None:
            improved = improve_module(module, known, options, peaks)._replace(flows=None)
            if len(known.outcomes) >= _MOST_KEPT:
                known.outcomes.pop(next(iter(known.outcomes)), None)
            known.outcomes[key] = improved
        better = improved.module
        if better is not None:
            message, own = wire.decode_message(better), wire.decode_message(module)
            message.set_number(program_peaks.MODULE_ID, own.number(program_peaks.MODULE_ID))
            better = wire.encode_message(message)
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
    again: Compile | None


def _find_compilation() -> _Compilation | None:
    """What the compilation that called the pass is for.

    XLA does not tell its passes. jax's function that compiles has it, and is one of our callers.
    """
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    for _ in range(_FRAMES):
        if frame is None:
            return None
        given = frame.f_locals
        if given.get("executable_devices") is not None:
            # It can be called again, unless it is another function, or the program calls the host.
            repeat: Any = getattr(importlib.import_module("jax._src.compiler"), frame.f_code.co_name, None)
            names = ("backend", "module", "executable_devices", "options", "host_callbacks")
            repeated: Compile | None = None
            if repeat is not None and all(each in given for each in names) and not given["host_callbacks"]:
                same = partial(repeat, **{each: given[each] for each in names})

                def again(more: Mapping[str, Any], same: partial[Any] = same) -> Any:
                    options = copy.copy(same.keywords["options"])
                    options.env_option_overrides = [*options.env_option_overrides, *more.items()]
                    return same(options=options)

                repeated = again
            return _Compilation(list(given["executable_devices"]), repeated)
        frame = frame.f_back
    return None


def fragments_of(devices: Sequence[Any]) -> Fragments:
    """The fragments for these devices; devices of equal topologies are equal."""

    def identity(device: Any) -> tuple[Any, ...]:
        place = getattr(device, "coords", None)
        place = tuple(place) if place is not None else None
        return device.platform, device.device_kind, device.id, device.process_index, place

    key = tuple(map(identity, devices))
    with _state.lock:
        if key not in _state.fragments:
            _state.fragments[key] = Fragments(devices)
        return _state.fragments[key]
