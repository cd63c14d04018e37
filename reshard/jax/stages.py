"""A function's program on its way: lowered twice, as it is and after the pass, and compiled to the better one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable as _serialize_executable

from reshard.errors import StrictError
from reshard.jax.compare import Decision, Figures, figures, idle, saved, worse
from reshard.jax.pass_report import Report
from reshard.jax.strict import Limits, check, limits

_serialize: Any = _serialize_executable


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program; call it with the arguments that it was lowered for, static ones left out.

    `executable` is JAX's own `jax.stages.Compiled`, `decision` says whether it has our collectives and why, and
    `report` what became of the program's reshards.
    """

    executable: Any
    decision: Decision
    report: Report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.executable(*args, **kwargs)

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        """The compiler's own account of its memory, in bytes a device."""
        return self.executable.memory_analysis()

    def cost_analysis(self) -> Any:
        """The compiler's own account of its arithmetic."""
        return self.executable.cost_analysis()

    @property
    def input_shardings(self) -> Any:
        """The shardings of the arguments, positional ones and those by name."""
        return self.executable.input_shardings

    @property
    def output_shardings(self) -> Any:
        """The shardings of what it returns."""
        return self.executable.output_shardings

    def check(self, limits: Limits) -> None:
        """Raises `StrictError` if the program is not within strict mode's limits."""
        if limits == Limits():
            return
        temp = int(self.memory_analysis().temp_size_in_bytes)
        check(self.as_text(), self.report, limits, temp)

    def serialize(self) -> bytes:
        """The compiled program as bytes, for `deserialize` under the same jax on devices of the same kind."""
        return pickle.dumps((*_serialize.serialize(self.executable), self.decision, self.report))


def deserialize(data: bytes) -> Compiled:
    """A compiled program from the bytes of `Compiled.serialize`. They are a pickle: read only what you trust."""
    *parts, decision, report = pickle.loads(data)
    return Compiled(_serialize.deserialize_and_load(*parts), decision, report)


class Attempt(NamedTuple):
    """A program after the pass, as JAX's own `jax.stages.Lowered`, and what became of its reshards."""

    lowered: Any
    report: Report


@dataclass(frozen=True, eq=False)
class Lowered:
    """A program as modules: `plain`, JAX's own `jax.stages.Lowered`, and `ours` after the pass.

    `ours` is None where there is nothing to try; `why` says why, `failed` that the pass could not do it. `again`
    makes another attempt, with the reshards of some lines left to XLA. `launch` is what starting a collective costs,
    in bytes.
    """

    plain: Any
    ours: Attempt | None
    why: str
    failed: bool
    again: Callable[[frozenset[str]], Attempt]
    report: Report
    launch: int
    limits: Limits

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        """The StableHLO, after the pass if it changed anything."""
        return (self.plain if self.ours is None else self.ours.lowered).as_text(*args, **kwargs)

    def compiler_ir(self, *args: Any, **kwargs: Any) -> Any:
        """The StableHLO as an MLIR module, after the pass if it changed anything."""
        return (self.plain if self.ours is None else self.ours.lowered).compiler_ir(*args, **kwargs)

    def compile(self) -> Compiled:
        """Compiles the program as it is and after the pass, and keeps the best that strict mode lets pass.

        Raises `StrictError` if it refuses all.
        """
        within = limits(self.limits)
        best, *others = self.candidates()
        try:
            best.check(within)
            return best
        except StrictError:
            for found in others:
                with suppress(StrictError):
                    found.check(within)
                    return found
            raise

    def candidates(self) -> list[Compiled]:
        """The compiled programs, the best one first."""
        plain = self.plain.compile()
        if self.ours is None:
            return [Compiled(plain, Decision("plain", self.why, self.failed), self.report)]
        try:
            before = figures(plain)
            tried = sorted(self._tried(plain, before, self.ours), key=lambda trial: trial.rank(self.launch))
        except Exception as error:  # Whatever it is, the plain program works.
            why = f"the program does not compile after the pass: {type(error).__name__}: {error}"
            return [Compiled(plain, Decision("plain", why, True), self.report.given_up(why))]
        ours = [trial.kept(before) for trial in tried]
        best = tried[0]
        why = best.reason or "strict mode refuses it after the pass"
        kept = Decision("plain", why, False, before, best.figures)
        as_it_was = Compiled(plain, kept, self.report.given_up(f"taken, the program would not be better: {why}"))
        return [as_it_was, *ours] if best.reason else [*ours, as_it_was]

    def _tried(self, plain: Any, before: Figures, first: Attempt) -> list[_Trial]:
        """The program after the pass, and where that is not better, or not in all lines, with lines left to XLA."""
        found = [self._trial(plain, before, first)]
        lines = {reshard.where for reshard in first.report.taken}
        lose, same = idle(before, found[0].figures, lines, self.launch)
        if 0 < len(lose) < len(lines):
            found.append(self._trial(plain, before, self.again(lose)))
        if len(lose) < len(same) < len(lines) and all(trial.reason for trial in found):
            found.append(self._trial(plain, before, self.again(same)))
        return found

    def _trial(self, plain: Any, before: Figures, attempt: Attempt) -> _Trial:
        executable = attempt.lowered.compile()
        found = figures(executable)
        elsewhere = not _same_places(plain, executable)
        reason = "its results would be sharded in another way" if elsewhere else worse(before, found, self.launch)
        return _Trial(executable, attempt.report, found, reason)


class _Trial(NamedTuple):
    """A compiled attempt, and why it is not better than the plain program, empty if it is."""

    executable: Any
    report: Report
    figures: Figures
    reason: str

    def rank(self, launch: int) -> tuple[bool, int, int]:
        """Less is better."""
        return bool(self.reason), self.figures.cost(launch), self.figures.temp_bytes

    def kept(self, plain: Figures) -> Compiled:
        why = self.reason or saved(plain, self.figures)
        return Compiled(self.executable, Decision("reshard", why, False, plain, self.figures), self.report)


def _same_places(plain: Any, ours: Any) -> bool:
    """Whether two compiled programs return the same shardings."""
    places: Any = zip(*(jax.tree.leaves(compiled.output_shardings) for compiled in (plain, ours)), strict=True)
    ranks = [len(out.shape) for out in jax.tree.leaves(plain.out_info)]
    return all(a.is_equivalent_to(b, rank) for (a, b), rank in zip(places, ranks, strict=True))
