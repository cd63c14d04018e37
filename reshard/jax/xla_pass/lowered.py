"""The stages of a program under `jit` with the pass inside XLA: `LoweredInXla`, its compilation, and what was decided.

The figures of XLA's own program are read from the module before the pass. It is not compiled, so its memory is not
known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from reshard.doctor.chain_fate import ChainFate
from reshard.jax.compare import Decision, figures, module_figures, savings
from reshard.jax.compiled import Compiled
from reshard.jax.doctor import devices_of, known_moves
from reshard.jax.pass_report import PassReport, Reshard
from reshard.jax.strict import Limits, effective_limits
from reshard.jax.xla_pass import xla_hook
from reshard.jax.xla_pass.jaxlib_reader import JaxlibReader
from reshard.jax.xla_pass.xla_hook import Enabled, ModuleReport, Watched

_MOST_REASONS = 3
_FIGURE = re.compile(r", \d+ B$")
_outcomes: WeakKeyDictionary[Any, tuple[Decision, PassReport]] = WeakKeyDictionary()  # by jax's executables


@dataclass(frozen=True, eq=False)
class LoweredInXla:
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
        with xla_hook.on(self.switched), xla_hook.watching() as watched:
            executable = self.lowered.compile(*args, **kwargs)
        held = _identity(executable)
        if not watched and held in _outcomes:
            return executable, *_outcomes[held]
        if not watched and _has_collectives(executable):
            with xla_hook.on(replace(self.switched, reports=[])), xla_hook.watching() as watched:
                executable = self.again().compile(*args, **kwargs)
            held = _identity(executable)
        outcome = _outcome(executable, watched)
        _outcomes[held] = outcome
        return executable, *outcome


def _outcome(executable: Any, watched: list[Watched]) -> tuple[Decision, PassReport]:
    """What the pass made of a program, and of each of its places."""
    after = figures(executable)
    if not watched:
        if len(devices_of(executable)) <= 1:
            return Decision("plain", "it runs on one device"), PassReport()
        if not after.launches:
            return Decision("plain", "it has no collectives", plain=after), PassReport()
        why = "jax's persistent cache had it, compiled with the pass; what was replaced then is not known"
        return Decision("reshard", why, ours=after), PassReport()
    module, report = watched[-1]
    places = PassReport(tuple(one for fate in report.fates for one in _places(fate)))
    if not report.changed:
        return Decision("plain", _why_unchanged(report), bool(report.why), after), places
    before = module_figures(JaxlibReader().text(module))
    return Decision("reshard", savings(before, after), False, before, after), places


def _places(fate: ChainFate) -> list[Reshard]:
    """The place of a chain in the report: one for each plan that took its place, or one that was left."""
    does = f"{fate.does}, {fate.received_bytes} B received"
    if not fate.plans:
        return [Reshard(fate.where, fate.computation, False, None, None, None, fate.replaced, fate.why, does=does)]
    return [
        Reshard(fate.where, fate.computation, False, plan.source, plan.target, plan, fate.replaced, fate.why, does=does)
        for plan in fate.plans
    ]


def _why_unchanged(report: ModuleReport) -> str:
    """One sentence on why the pass replaced nothing, with the reasons by how many chains they hold for."""
    if report.why:
        return f"the pass cannot do it: {report.why}"
    if not report.fates:
        return "it has no chain of collectives that could be replaced"
    reasons = Counter(_FIGURE.sub("", fate.why) for fate in report.fates)
    listed = "; ".join(f"{count} of {len(report.fates)}: {why}" for why, count in reasons.most_common(_MOST_REASONS))
    return f"none of its chains of collectives can be replaced: {listed}"


def _identity(executable: Any) -> Any:
    """What jax caches of a compiled program; the `jax.stages.Compiled` around it is new each time."""
    return getattr(executable, "_executable", executable)


def _has_collectives(executable: Any) -> bool:
    return len(devices_of(executable)) > 1 and figures(executable).launches > 0
