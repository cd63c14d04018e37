"""The command as a whole: exit codes, errors, pipes, terminals, and what it imports."""

import os
import subprocess
import sys

import pytest

from tests.cli.cases import ARRAY, MESH, ROOT, SOURCE, TARGET


def _process(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR"}}
    full = {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **env}
    command = [sys.executable, "-m", "reshard", *argv]
    return subprocess.run(command, env=full, capture_output=True, encoding="utf-8", timeout=600, check=False)


def test_a_pipe_gets_no_colour_and_no_wrapped_rows():
    layouts = [f"f32[{', '.join(dims)}]" for dims in (["{x}4", *["16"] * 40], ["16", "{x}4", *["16"] * 39])]
    ran = _process("plan", *MESH, *layouts, PYTHONUTF8="1")
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout
    assert layouts[1] in next(line for line in ran.stdout.splitlines() if "all_to_all" in line)


def test_a_narrow_terminal_loses_no_number(call):
    out = call("plan", *MESH, SOURCE, TARGET, "--network", "h100", columns=40).out
    assert "all_gather" in out
    assert "seconds" in out
    assert "…" not in out


def test_an_ascii_terminal():
    ran = _process("show", *MESH, "f32[{x}4, {y}8]", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.returncode == 0, ran.stderr
    assert "|  8:12 |  4   |  5   |" in ran.stdout


def test_a_closed_pipe_is_not_an_error():
    layouts = f"'{SOURCE}' '{TARGET}'"
    command = f"{sys.executable} -m reshard plan --mesh x=4,y=2 {layouts} --explain | head -0; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("0", "")


STREAMS = {
    f"plan --mesh x=4,y=2 '{SOURCE}' '{TARGET}' --json > /dev/full": (2, "the answer cannot be written (No space left"),
    "--help > /dev/full": (2, "the answer cannot be written (No space left"),
    f"plan --mesh x=4,y=2 '{SOURCE}' '{TARGET}' >&-": (0, ""),
    "plan --batch - <&-": (0, ""),
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize("call", STREAMS)
def test_a_full_disk_is_an_error_of_the_call_and_a_closed_stream_is_none(call: str):
    code, message = STREAMS[call]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f"exec {sys.executable} -m reshard {call}"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (code, bool(message)), ran
    assert message in ran.stderr


def test_the_command_loads_no_jax():
    code = "import sys, reshard.cli as c; c.main(sys.argv[1:]); print([m for m in ('jax', 'z3') if m in sys.modules])"
    command = [sys.executable, "-c", code, "plan", "--mesh", "x=0", SOURCE, TARGET]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ran.stderr.startswith("reshard: error: ")
    assert ran.stdout == "[]\n"


def test_the_help_loads_no_library():
    foreign = ("rich", "numpy", "jax", "z3", "matplotlib", "mpi4py")
    loaded = f"[name for name in {foreign} if name in sys.modules]"
    code = f"import sys, reshard.cli.parser as p; p.parser().format_help(); print({loaded})"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=True)
    assert ran.stdout == "[]\n"


PAIR = (SOURCE, TARGET)

BAD = [
    (("plan", *PAIR), "give the mesh: --mesh x=4,y=2"),
    (("plan", *MESH, "P('y')", "P('x')"), "give shape and dtype: --shape 16,16 --dtype f32"),
    (("plan", *MESH, "P('y')", "P('x')", "--shape", "4"), "give dtype: --dtype f32"),
    (("plan", "P('y')", "P('x')", *ARRAY), "give the mesh: --mesh x=4,y=2"),
    (("plan", "--mesh", "x=4;y=2", *PAIR), "write axes as name=size"),
    (("plan", "--mesh", "x=0", *PAIR), "at least 1"),
    (("plan", "--mesh", "x=4,x=2", *PAIR), "occurs twice"),
    (("plan", *MESH, "f32[{z}4]", "f32[16]"), "unknown axis 'z': mesh <x=4, y=2> has axes x, y"),
    (("plan", *MESH, "f32[{x}4, {x}4]", "f32[16, 16]"), "single use"),
    (("plan", *MESH, "f32[{x}4", "f32[16]"), "f32[{x}4"),
    (("plan", *MESH, "nonsense", "f32[16]"), "cannot tell the notation of 'nonsense'"),
    (("plan", *MESH, "f32[{x}4]", "f32[{x}8]"), "give both the same global shape"),
    (("plan", *MESH, "f32[{x}4]", "bf16[16]"), "cast before or after"),
    (("plan", *MESH, "q7[{x}4]", "f32[16]"), "unknown dtype 'q7'"),
    (("plan", *MESH, "f32[16]", "f32[16] + mean{x}"), "leaves a mean as it is"),
    (("plan", *MESH, *PAIR, "--shape", "16,16"), "has global shape (16, 16, 16), not (16, 16)"),
    (("plan", *MESH, *PAIR, "--shape", "16,a"), "cannot read the shape '16,a'"),
    (("plan", *MESH, *PAIR, "--dtype", "f64"), "has dtype float32, not float64"),
    (("plan", *MESH, *PAIR, "--budget", "64 bananas"), "cannot read the size '64 bananas'"),
    (("plan", *MESH, *PAIR, "--budget", "much"), "cannot read the size 'much'"),
    (("plan", *MESH, *PAIR, "--budget=-1MiB"), "cannot read the size '-1MiB'"),
    (("plan", *MESH, *PAIR, "--budget", "1.2.3GB"), "cannot read the size '1.2.3GB'"),
    (("plan", *MESH, *PAIR, "--budget", "4095"), "the smallest that works is 4096 B"),
    (("plan", *MESH, *PAIR, "--network", "tpu-v99"), "tpu-v99"),
    (("plan", *MESH, *PAIR, "--target-mesh", "x=4,y=2@many"), "the first device, such as 8 in z=4@8"),
    (("plan", *MESH, SOURCE, "{devices=[1,4,1]<=[4]}"), "4"),
    (("plan", *MESH, SOURCE, "{devices=[1,8,1]<=[4,2]T(1,1)}"), "T(1,1)"),
    (("plan", *MESH, SOURCE, "{maximal device=0}"), "maximal"),
    (("plan", *MESH, SOURCE, "[{}, {}, {}, {}]"), "global shape (16, 16, 16)"),
    (("show", *MESH, "f32[{x}4]", "--limit", "0"), "--limit 0"),
    (("show", *MESH, "f32[{x}4]", "--limit", "9" * 30), "at most 1048576"),
    (("plan", *MESH, *PAIR, "--tree"), "leave --tree out"),
    (("plan", *MESH, *PAIR, "--json", "--explain"), "leave one of them out"),
    (("plan", *MESH, *PAIR, "--size", "view=3"), "no atom can have this name"),
    (("run", "-n", "2", "-m"), "nothing to run"),
    (("doctor", f"{ROOT}/tests/doctor/data/train_v5p_0.12.0.1.hlo", "--platform", "tpv"), "give one of cpu, gpu"),
    (("show", *MESH, "f32[{x}5/16]"), "exact cover"),
    (("simulate", *MESH, "f32[{x}65536, 65536]", "f32[262144, {x}16384]"), "times fewer elements"),
    (("simulate", "--mesh", "x=8192", "f32[{x}1]", "f32[8192]"), "at most 4096"),
    (("simulate", *MESH, *PAIR, "--seed", "-1"), "--seed -1"),
    (("doctor", "\0"), "cannot read '\\x00': no file can have this name"),
    (("plan", *MESH, *PAIR, "--html", "\ud800"), "cannot write '\\ud800': no file can have this name"),
]


@pytest.mark.parametrize(("argv", "advice"), BAD, ids=[advice for _, advice in BAD])
def test_a_bad_call_is_an_error_with_advice(call, argv, advice):
    ran = call(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("reshard: error: ")
    assert ran.err.count("\n") == 1
    assert advice in ran.err
