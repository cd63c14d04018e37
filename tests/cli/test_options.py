"""Every command's options are filled by its own arguments, and by nothing else."""

import argparse
from dataclasses import dataclass, fields

import pytest

from reshard.cli.calibrate import CalibrateOptions
from reshard.cli.compiler_pass import CompilerPassOptions
from reshard.cli.doctor import DoctorOptions
from reshard.cli.options import ArrayOptions, Options, PairOptions, add_command
from reshard.cli.parser import CompletionOptions, parse
from reshard.cli.plan import PlanCommand
from reshard.cli.prove import ProveOptions
from reshard.cli.run import RunOptions
from reshard.cli.show import ShowOptions
from reshard.cli.simulate import SimulateOptions

GROUPS = [
    ArrayOptions,
    PairOptions,
    PlanCommand,
    ShowOptions,
    SimulateOptions,
    ProveOptions,
    DoctorOptions,
    CompilerPassOptions,
    RunOptions,
    CalibrateOptions,
    CompletionOptions,
]


@pytest.mark.parametrize("kind", GROUPS)
def test_each_field_has_an_argument_and_each_argument_a_field(kind):
    parser = argparse.ArgumentParser(add_help=False)
    kind.add_to(parser)
    assert {action.dest for action in parser._actions} == {field.name for field in fields(kind)}
    assert all(action.help for action in parser._actions)


CALLS = [
    (["plan", "S", "T", "--mesh", "x=2", "--json"], {"source": "S", "target": "T", "mesh": "x=2", "json": True}),
    (["plan", "S", "T", "--target-mesh", "y=2", "--donate"], {"target_mesh": "y=2", "donate": True, "html": None}),
    (["plan", "S", "T", "--slack", "0.1"], {"slack": "0.1", "donate": False}),
    (["show", "L"], {"layout": "L", "limit": 32, "shape": None}),
    (["simulate", "S", "T", "--seed", "5", "--budget", "4KiB"], {"seed": 5, "budget": "4KiB", "network": None}),
    (["prove", "S", "T", "-o", "q", "--launches", "--limit", "2"], {"output": "q", "launches": True, "limit": 2.0}),
    (["doctor", "f", "--fail-on-rebuild"], {"file": "f", "fail_on_rebuild": True, "platform": None}),
    (["pass", "f", "--network", "h100"], {"file": "f", "network": "h100", "report": False, "budget": None}),
    (["run", "-n", "3", "s.py", "--json", "-x"], {"ranks": 3, "arguments": ["s.py", "--json", "-x"]}),
    (["run", "-n", "3", "-m", "pkg.mod", "-n", "5"], {"ranks": 3, "module": ["pkg.mod", "-n", "5"], "arguments": []}),
    (["calibrate"], {"ranks": None, "output": None, "name": "calibrated"}),
]


@pytest.mark.parametrize(("argv", "values"), CALLS, ids=[" ".join(argv) for argv, _ in CALLS])
def test_a_call_fills_the_options(argv, values):
    options = parse(argv).options
    assert {name: getattr(options, name) for name in values} == values


def test_a_command_runs_with_its_options_and_returns_its_code():
    @dataclass(frozen=True)
    class Count(Options):
        times: int

        @classmethod
        def add_to(cls, parser):
            parser.add_argument("--times", type=int, default=1)

    calls = []

    def run(options):
        calls.append(options)
        return options.times

    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "count", "counts things", "epilog", Count, run)
    for argv, times in ((["count"], 1), (["count", "--times", "7"], 7)):
        parsed = parser.parse_args(argv)
        assert parsed.call(parsed)() == times
    assert calls == [Count(1), Count(7)]
