"""`reshard simulate`: runs a plan on random data and checks every element against the target's meaning."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from reshard.cli.options import NOTATIONS, Command, MoveOptions
from reshard.errors import ReshardError

_EXAMPLES = """\
examples:
  reshard simulate --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      'f32[16, {x}{y}2, 16]'
  reshard simulate --mesh x=4,y=2 'f32[{x}2{y}4]' \\
      'f32[{y}{x}8]' --seed 7
  reshard simulate --mesh x=4,y=2 'f32[8, 16] + sum{x}' \\
      'f32[{x}2, 16]'
  reshard simulate --mesh x=8 'f32[{x}8, 64]' \\
      'f32[64, {x}8]' --budget 4100
"""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(MoveOptions):
    """The options of `reshard simulate`."""

    seed: int

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds those of a move, and the seed."""
        super().add_to(parser)
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random data (default 0)")


def run_simulate(options: SimulateOptions) -> int:
    """Plans, runs and checks; returns 0 if the result and the plan's promises hold, else 1."""
    from reshard.cli.requests import plan_for_options
    from reshard.cli.trial import Trial, check_simulated_size, list_promises, show_promises, show_verdict
    from reshard.runtime import Account, simulate
    from reshard.show import terminal
    from reshard.show.plan_table import show_heading, show_steps

    if options.seed < 0:
        raise ReshardError(f"--seed {options.seed}: give a whole number of at least 0")
    source, target, plan = plan_for_options(options)
    check_simulated_size(plan)
    trial, account = Trial(source, target, options.seed, plan.view), Account(plan.source.dtype)
    fills: dict[str, Any] = {} if (into := trial.target_tiles()) is None else {"into": into}
    faults = trial.faults(simulate(plan, trial.source_tiles(), account, **fills))
    measured = list_promises(plan, account)
    kept = all(promise.kept for promise in measured)
    out = terminal.open_console()
    show_heading(out, source, target)
    show_steps(out, plan)
    show_promises(out, measured)
    show_verdict(out, plan, faults, kept)
    return 0 if kept and not faults else 1


COMMAND = Command(
    "simulate",
    "run a plan on random data, on all devices in this process, and check the result",
    f"{NOTATIONS}\n{_EXAMPLES}",
    SimulateOptions,
    run_simulate,
)
