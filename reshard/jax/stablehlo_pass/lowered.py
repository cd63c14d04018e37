"""`Lowered`, a program before and after the pass on its StableHLO: compiles both, and keeps the better one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from reshard.errors import StrictError
from reshard.jax.compare import Decision, ProgramFigures, figures, savings, unprofitable_lines, why_worse
from reshard.jax.compiled import Compiled
from reshard.jax.pass_report import PassReport
from reshard.jax.strict import Limits, effective_limits


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

        Raises the `StrictError` of the best program if strict mode refuses all of them.
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
