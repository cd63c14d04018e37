"""The arguments of the command and its help; nothing is read here, so that errors are ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from reshard import __version__

NOTATIONS = """\
notations of a layout:
  ours     f32[{y}8, 16, {x}4]              digits per dim: 8 local, {y} held
  JAX      P('y', None, 'x')                with --mesh, --shape, --dtype
  Shardy   [{"y"}, {}, {"x"}]               with --mesh, --shape, --dtype
  HLO      {devices=[2,1,4]<=[4,2]T(1,0)}   with --shape, --dtype; has a mesh
The shape and dtype of a layout in our notation serve for the other one, too.
"""

_MAIN = """\
examples:
  reshard plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]'
  reshard show --mesh x=4,y=2 'f32[{x}4, {y}8]'
  reshard simulate --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]'
  reshard doctor step.mlir

reshard COMMAND --help has more of them.
"""

_PLAN = """\
examples:
  reshard plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]'
  reshard plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      "P(None, ('x', 'y'))" --explain
  reshard plan --mesh x=4,y=2 '[{"x"}, {}]' '[{}, {"x", "y"}]' \\
      --shape 4096,4096 --dtype bf16 --budget 64MiB --network tpu-v5p
  reshard plan '{devices=[2,1,4]<=[4,2]T(1,0)}' '{devices=[1,8,1]<=[8]}' \\
      --shape 16,16,16 --dtype f32 --json
  reshard plan --mesh x=4,y=2 'f32[8, 16] + sum{x}' 'f32[{x}2, 16]' --donate
  reshard plan --mesh p=2,q=3 --target-mesh r=6 'f32[{p}{q}7/40]' 'f32[{r}7/40]'
  reshard plan --mesh x=4 'f64[16{x}64, 1024]' 'f64[4096, {x}256]' \\
      --html plan.html
"""

_SHOW = """\
examples:
  reshard show --mesh x=4 'f32[2{x}64]'
  reshard show --mesh x=4,y=2 'f32[{x}4, {y}8]'
  reshard show --mesh x=4,y=2 'f32[{y}8, 16, {x}4]'
  reshard show --mesh x=4,y=2 'f32[{y}8, 16] + sum{x}'
  reshard show --mesh x=4,y=2 "P(('x', 'y'))" --shape 100,8 --dtype bf16
  reshard show '{devices=[2,2,2]<=[8] last_tile_dim_replicate}' \\
      --shape 8,8 --dtype f32
"""

_SIMULATE = """\
examples:
  reshard simulate --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]'
  reshard simulate --mesh x=4,y=2 'f32[{x}2{y}4]' 'f32[{y}{x}8]' --seed 7
  reshard simulate --mesh x=4,y=2 'f32[8, 16] + sum{x}' 'f32[{x}2, 16]'
  reshard simulate --mesh x=8 'f32[{x}8, 64]' 'f32[64, {x}8]' --budget 4100
"""

_DOCTOR = """\
examples:
  reshard doctor step.mlir
  reshard doctor step.hlo.txt --all
  reshard doctor step.mlir --html report.html
  reshard doctor step.mlir --json --fail-on-rebuild
  reshard doctor step.mlir --platform tpu --topology v5p:2x2x2

what to put into such a file, with lowered = jax.jit(f).lower(*args):
  lowered.as_text(debug_info=True)   StableHLO; it is compiled here
  lowered.compile().as_text()        optimized HLO; it is read as it is
"""

_RUN = """\
examples:
  reshard run -n 4 script.py
  reshard run -n 8 script.py --option of the script
  reshard run -n 2 -m package.module
"""

_CALIBRATE = """\
examples:
  reshard calibrate -n 4 -o network.json
  mpiexec -n 64 reshard calibrate -o network.json
  reshard plan --network ./network.json ...
"""

_PASS = """\
examples:
  reshard pass step.mlir -o ours.mlir
  reshard pass step.mlir -o ours.mlirbc --report
  reshard pass step.mlir --report --network tpu-v5p
  reshard pass step.mlir --json --budget 1GiB
"""

_PROVE = """\
examples:
  reshard prove --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]'
  reshard prove --mesh x=4,y=2 'f32[{x}3/10, 8]' 'f32[{y}5, 8]'
  reshard prove --mesh x=8 'f32[{x}8, 64]' 'f32[64, {x}8]' -o queries.smt2
  reshard prove --mesh x=2,y=2,z=2 'f32[{x}4, {y}4]' 'f32[{y}4, 8]' --launches
"""

Handler = Callable[["Options"], int]


class Options(argparse.Namespace):
    """What was asked for, as text; each command has some of these."""

    handler: Handler
    layout: str
    source: str
    target: str
    mesh: str | None
    target_mesh: str | None
    shape: str | None
    dtype: str | None
    budget: str | None
    network: str | None
    donate: bool
    json: bool
    explain: bool
    seed: int
    limit: int
    file: str
    html: str | None
    all: bool
    fail_on_rebuild: bool
    platform: str
    topology: str | None
    output: str | None
    report: bool
    ranks: int | None
    arguments: list[str]
    name: str
    launches: bool
    seconds: float


def parse(argv: Sequence[str] | None) -> Options:
    """The options of a call; prints and exits for --help, --version and calls that do not parse."""
    return parser().parse_args(argv, Options())


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    top = argparse.ArgumentParser(
        prog="reshard",
        description="The cheapest collectives that move an array from one sharded layout to another.",
        epilog=f"{NOTATIONS}\n{_MAIN}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"reshard {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_plan(commands.add_parser)
    _add_show(commands.add_parser)
    _add_simulate(commands.add_parser)
    _add_prove(commands.add_parser)
    _add_doctor(commands.add_parser)
    _add_pass(commands.add_parser)
    _add_run(commands.add_parser)
    _add_calibrate(commands.add_parser)
    return top


_Adder = Callable[..., argparse.ArgumentParser]


def _command(
    add: _Adder, name: str, what: str, examples: str, handler: Handler, notations: str = f"{NOTATIONS}\n"
) -> argparse.ArgumentParser:
    command = add(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"{notations}{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(handler=handler)
    return command


def _add_plan(add: _Adder) -> None:
    what = "the steps from one layout to another, with bytes, memory and time"
    command = _command(add, "plan", what, _PLAN, _run_plan)
    _add_pair(command)
    command.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    command.add_argument("--html", metavar="FILE", help="write one self-contained page, with pictures, instead")
    command.add_argument("--explain", action="store_true", help="say in plain words why each step is there")


def _add_show(add: _Adder) -> None:
    what = "a picture of which device holds what"
    command = _command(add, "show", what, _SHOW, _run_show)
    command.add_argument("layout", metavar="LAYOUT", help="a layout in any of the notations below")
    _add_array(command)
    command.add_argument("--limit", type=int, default=32, metavar="N", help="lines of the picture, about (default 32)")


def _add_simulate(add: _Adder) -> None:
    what = "run a plan on random data, on all devices in this process, and check the result"
    command = _command(add, "simulate", what, _SIMULATE, _run_simulate)
    _add_pair(command)
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random data (default 0)")


def _add_prove(add: _Adder) -> None:
    what = "prove that a plan is right and within its memory, for all sizes of its form"
    command = _command(add, "prove", what, _PROVE, _run_prove)
    _add_pair(command)
    command.add_argument("-o", "--output", metavar="FILE", help="write its queries as SMT-LIB, for another solver")
    command.add_argument("--launches", action="store_true", help="also seek a plan of fewer launches that is as good")
    what = "how long to seek it (default 30)"
    command.add_argument("--limit", dest="seconds", type=float, default=30.0, metavar="SECONDS", help=what)


def _add_doctor(add: _Adder) -> None:
    what = "where a program moves its data between devices, and what it wastes"
    command = _command(add, "doctor", what, _DOCTOR, _run_doctor, notations="")
    command.add_argument("file", metavar="FILE", help="StableHLO (text or artifact) or optimized HLO; - is stdin")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    command.add_argument("--html", metavar="FILE", help="write one self-contained page instead of the table")
    command.add_argument("--all", action="store_true", help="also reductions, shard_maps and small moves")
    command.add_argument("--network", metavar="NAME", help="plan for least time on a preset or a JSON file")
    command.add_argument("--platform", default="cpu", metavar="NAME", help="compile StableHLO for this (default cpu)")
    command.add_argument("--topology", metavar="NAME", help="ahead of time for a topology: v5p:2x2x2")
    command.add_argument("--fail-on-rebuild", action="store_true", help="exit with 1 if a whole array is rebuilt")


def _add_pass(add: _Adder) -> None:
    what = "put reshard's collectives into a StableHLO program"
    command = _command(add, "pass", what, _PASS, _run_pass, notations="")
    command.add_argument("file", metavar="FILE", help="StableHLO with Shardy shardings, text or artifact; - is stdin")
    command.add_argument("-o", "--output", metavar="FILE", help="text if it ends in .mlir, else a portable artifact")
    command.add_argument("--report", action="store_true", help="print what became of each reshard")
    command.add_argument("--json", action="store_true", help="print that as one JSON object")
    command.add_argument("--network", metavar="NAME", help="plan for least time on a preset or a JSON file")
    command.add_argument("--budget", metavar="SIZE", help="most bytes live on a device in one move, e.g. 64MiB")


def _add_run(add: _Adder) -> None:
    what = "run a Python script on MPI ranks"
    command = _command(add, "run", what, _RUN, _run_run, notations="")
    command.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="it, and its arguments")


def _add_calibrate(add: _Adder) -> None:
    what = "measure the latencies and bandwidths of MPI ranks, as a network to plan for"
    command = _command(add, "calibrate", what, _CALIBRATE, _run_calibrate, notations="")
    command.add_argument("-n", "--ranks", type=int, metavar="N", help="start so many (default: those that run it)")
    command.add_argument("-o", "--output", metavar="FILE", help="where the network is written (default: stdout)")
    command.add_argument("--name", default="calibrated", metavar="NAME", help="the network's name (default calibrated)")


def _add_pair(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="SOURCE", help="the layout now, in any of the notations below")
    command.add_argument("target", metavar="TARGET", help="the layout wanted, in any of them")
    _add_array(command)
    command.add_argument("--target-mesh", metavar="AXES", help="the mesh of TARGET, if it is another one")
    command.add_argument("--budget", metavar="SIZE", help="most bytes live on a device, e.g. 64MiB, 0.5GiB or 4096")
    command.add_argument("--network", metavar="NAME", help="plan for least time on a preset or a JSON file")
    command.add_argument("--donate", action="store_true", help="the source may be given up once its data has moved")


def _add_array(command: argparse.ArgumentParser) -> None:
    command.add_argument("--mesh", metavar="AXES", help="axes of the mesh, first one major, e.g. x=4,y=2")
    command.add_argument("--shape", metavar="SIZES", help="global shape, where the layout does not say it: 16,16,16")
    command.add_argument(
        "--dtype", metavar="NAME", help="element type, where the layout does not say it: f32, bfloat16"
    )


# Each command loads what it needs, and rich with it, only when it runs.


def _run_plan(options: Options) -> int:
    from reshard.cli.plan import run

    return run(options)


def _run_show(options: Options) -> int:
    from reshard.cli.show import run

    return run(options)


def _run_simulate(options: Options) -> int:
    from reshard.cli.simulate import run

    return run(options)


def _run_prove(options: Options) -> int:
    from reshard.cli.prove import run

    return run(options)


def _run_doctor(options: Options) -> int:
    from reshard.cli.doctor import run

    return run(options)


def _run_pass(options: Options) -> int:
    from reshard.cli.compiler_pass import run

    return run(options)


def _run_run(options: Options) -> int:
    from reshard.cli.run import run

    return run(options)


def _run_calibrate(options: Options) -> int:
    from reshard.cli.calibrate import run

    return run(options)
