"""The stages of a program under `jit`, as in `jax.stages`: `Lowered` (plain and after the pass) and `Compiled`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable as _serialize_executable

from reshard.errors import ProgramError, StrictError, quoted
from reshard.jax.compare import Decision, ProgramFigures, figures, savings, unprofitable_lines, why_worse
from reshard.jax.doctor import devices_of, optimized_text
from reshard.jax.pass_report import PassReport
from reshard.jax.strict import Limits, check, effective_limits

_jax: Any = jax  # Its own stubs leave too much unknown.
_serialize: Any = _serialize_executable


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program; call it with the arguments that it was lowered for, without the static ones.

    `executable` is JAX's own `jax.stages.Compiled`, `decision` says whether it runs our collectives and why, and
    `report` what was done with each of the program's reshards.

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

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        """The compiler's own figures for its memory, in bytes per device."""
        return self.executable.memory_analysis()

    def cost_analysis(self) -> Any:
        """The compiler's own figures for its arithmetic."""
        return self.executable.cost_analysis()

    @property
    def input_shardings(self) -> Any:
        """The shardings of the arguments: a tuple for the positional ones and a dict for those by name."""
        return self.executable.input_shardings

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results."""
        return self.executable.output_shardings

    def check(self, limits: Limits) -> None:
        """Raises `StrictError` if the program exceeds the limits of strict mode."""
        if limits == Limits():
            return
        temp = int(self.memory_analysis().temp_size_in_bytes)
        check(optimized_text(self.executable), self.report, limits, temp)

    def serialize(self) -> bytes:
        """The compiled program as bytes, for `deserialize` under the same jax on devices of the same kind."""
        devices = [device.id for device in devices_of(self.executable)]
        return pickle.dumps((devices, *_serialize.serialize(self.executable), self.decision, self.report))


def deserialize(data: bytes) -> Compiled:
    """The compiled program from the bytes of `Compiled.serialize`; they are a pickle, so load only what you trust.

    It runs on the devices that it was compiled for. Raises `ProgramError` if the process does not have them, or if the
    bytes are not those of `serialize` under this version.

    >>> from reshard.jax import jit
    >>> data = jit(lambda x: 2 * x).lower(4.0).compile().serialize()
    >>> float(deserialize(data)(4.0))
    8.0
    """
    try:
        ids, *parts, decision, report = pickle.loads(data)
        known = {device.id: device for device in _jax.devices()}
        missing = [each for each in ids if each not in known]
    except Exception as error:  # Unpickling fails in any way.
        raise ProgramError(f"the bytes are not those of a compiled program's serialize(): {error}") from None
    if missing:
        raise ProgramError(
            f"the program was compiled for devices {quoted(ids)}, and this process has no {quoted(missing)} among its "
            f"{len(known)}; load it where the devices have the same ids, or compile it again"
        )
    # JAX itself would load it for all devices of the process, and abort the process where these are more.
    loaded = _serialize.deserialize_and_load(*parts, execution_devices=[known[each] for each in ids])
    return Compiled(loaded, decision, report)


class Attempt(NamedTuple):
    """A program after the pass, as JAX's own `jax.stages.Lowered`, and the report of its reshards."""

    lowered: Any
    report: PassReport


@dataclass(frozen=True, eq=False)
class Lowered:
    """A lowered program: `plain` as JAX's own `jax.stages.Lowered`, and `ours` after the pass.

    `ours` is None if there is nothing to try, for reason `why`; `failed` if the pass could not handle the program.
    `retry` makes another attempt that leaves the reshards of some lines to XLA. `launch` is the cost of starting a
    collective, in bytes, and `prefer` is what `ours` must make better.
    """

    plain: Any
    ours: Attempt | None
    why: str
    failed: bool
    retry: Callable[[frozenset[str]], Attempt]
    report: PassReport
    launch: int
    limits: Limits
    prefer: str = "bytes"

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        """The StableHLO text, after the pass if there is anything to try."""
        return (self.plain if self.ours is None else self.ours.lowered).as_text(*args, **kwargs)

    def compiler_ir(self, *args: Any, **kwargs: Any) -> Any:
        """The StableHLO as an MLIR module, after the pass if there is anything to try."""
        return (self.plain if self.ours is None else self.ours.lowered).compiler_ir(*args, **kwargs)

    def compile(self) -> Compiled:
        """Compiles the program before and after the pass, and keeps the best one that strict mode accepts.

        Raises `StrictError`, the one of the best program, if strict mode refuses all.
        """
        limits = effective_limits(self.limits)
        best, *others = self.candidates()
        try:
            best.check(limits)
            return best
        except StrictError:
            for other in others:
                with suppress(StrictError):
                    other.check(limits)
                    return other
            raise

    def candidates(self) -> list[Compiled]:
        """The compiled programs, the best one first."""
        plain = self.plain.compile()
        if self.ours is None:
            return [Compiled(plain, Decision("plain", self.why, self.failed), self.report)]
        try:
            before = figures(plain)
            trials = sorted(self._trials(plain, before, self.ours), key=lambda trial: trial.rank(self.launch))
        except Exception as error:  # Whatever failed, the plain program works.
            why = f"the program does not compile after the pass: {type(error).__name__}: {error}"
            return [Compiled(plain, Decision("plain", why, True), self.report.given_up(why))]
        ours = [trial.kept(before) for trial in trials]
        best = trials[0]
        why = best.reason or "strict mode refuses it after the pass"
        kept = Decision("plain", why, False, before, best.figures)
        unchanged = Compiled(plain, kept, self.report.given_up(f"the program would not be better with it: {why}"))
        return [unchanged, *ours] if best.reason else [*ours, unchanged]

    def _trials(self, plain: Any, before: ProgramFigures, first: Attempt) -> list[_Trial]:
        """The program after the pass; and, if that does not gain in every line, with lines left to XLA."""
        trials = [self._trial(plain, before, first)]
        lines = {reshard.where for reshard in first.report.taken}
        losing, not_gaining = unprofitable_lines(before, trials[0].figures, lines, self.launch)
        if 0 < len(losing) < len(lines):
            trials.append(self._trial(plain, before, self.retry(losing)))
        if len(losing) < len(not_gaining) < len(lines) and all(trial.reason for trial in trials):
            trials.append(self._trial(plain, before, self.retry(not_gaining)))
        return trials

    def _trial(self, plain: Any, before: ProgramFigures, attempt: Attempt) -> _Trial:
        executable = attempt.lowered.compile()
        after = figures(executable)
        same = _same_shardings(plain, executable)
        reason = "its results would be sharded in another way"
        if same:
            reason = why_worse(before, after, self.launch, self.prefer)
        return _Trial(executable, attempt.report, after, reason)


class _Trial(NamedTuple):
    """A compiled attempt, and the reason why it is not better than the plain program; empty if it is better."""

    executable: Any
    report: PassReport
    figures: ProgramFigures
    reason: str

    def rank(self, launch: int) -> tuple[bool, int, int]:
        """A sort key: the best trial has the least."""
        return bool(self.reason), self.figures.cost(launch), self.figures.temp_bytes or 0

    def kept(self, plain: ProgramFigures) -> Compiled:
        why = self.reason or savings(plain, self.figures)
        return Compiled(self.executable, Decision("reshard", why, False, plain, self.figures), self.report)


def _same_shardings(plain: Any, ours: Any) -> bool:
    """Whether the results of two compiled programs are sharded alike."""
    shardings: Any = zip(*(jax.tree.leaves(compiled.output_shardings) for compiled in (plain, ours)), strict=True)
    ranks = [len(out.shape) for out in jax.tree.leaves(plain.out_info)]
    return all(a.is_equivalent_to(b, rank) for (a, b), rank in zip(shardings, ranks, strict=True))
