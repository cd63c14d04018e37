"""The command as a whole: exit codes, errors, pipes, terminals, help, completion, and what it imports."""

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from reshard.cli.parser import build_parser, find_commands, parse_command
from reshard.synth.network import PRESETS
from tests.cli.cases import MESH, ROOT, SOURCE, TARGET


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


def test_an_ascii_terminal():
    ran = _process("show", *MESH, "f32[{x}4, {y}8]", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.returncode == 0, ran.stderr
    assert "|  8:12 |  4   |  5   |" in ran.stdout


def test_a_closed_pipe_ends_the_command_without_a_message():
    layouts = f"'{SOURCE}' '{TARGET}'"
    command = f"{sys.executable} -m reshard plan --mesh x=4,y=2 {layouts} --explain | head -0; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("141", "")


STREAMS = {
    f"plan --mesh x=4,y=2 '{SOURCE}' '{TARGET}' --json > /dev/full": (2, "the answer cannot be written (No space left"),
    "--help > /dev/full": (2, "the answer cannot be written (No space left"),
    f"plan --mesh x=4,y=2 '{SOURCE}' '{TARGET}' >&-": (0, ""),
    "plan --batch - <&-": (0, ""),
    "plan --mesh x=0 a b 2> /dev/full": (2, ""),
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
    code = f"import sys, reshard.cli.parser as p; p.build_parser().format_help(); print({loaded})"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=True)
    assert ran.stdout == "[]\n"


PAIR = (SOURCE, TARGET)

BAD = [
    (("plan", *PAIR), "give the mesh: --mesh x=4,y=2"),
    (("plan", *MESH, "P('y')", "P('x')"), "give shape and dtype: --shape 16,16 --dtype f32"),
    (("plan", *MESH, "P('y')", "P('x')", "--shape", "4"), "give dtype: --dtype f32"),
    (("plan", "--mesh", "x=4;y=2", *PAIR), "write axes as name=size"),
    (("plan", "--mesh", "x=0", *PAIR), "at least 1"),
    (("plan", *MESH, "f32[{z}4]", "f32[16]"), "unknown axis 'z': mesh <x=4, y=2> has axes x, y"),
    (("plan", *MESH, "f32[{x}4, {x}4]", "f32[16, 16]"), "single use"),
    (("plan", *MESH, "nonsense", "f32[16]"), "cannot tell the notation of 'nonsense'"),
    (("plan", *MESH, "f32[{x}4]", "f32[{x}8]"), "give both the same global shape"),
    (("plan", *MESH, "f32[{x}4]", "bf16[16]"), "cast before or after"),
    (("plan", *MESH, "q7[{x}4]", "f32[16]"), "unknown dtype 'q7'"),
    (("plan", *MESH, *PAIR, "--shape", "16,16"), "has global shape (16, 16, 16), not (16, 16)"),
    (("plan", *MESH, *PAIR, "--dtype", "f64"), "has dtype float32, not float64"),
    (("plan", *MESH, *PAIR, "--budget", "64 bananas"), "cannot read the size '64 bananas'"),
    (("plan", *MESH, *PAIR, "--budget", "4095"), "the smallest that works is 4096 B"),
    (("plan", *MESH, *PAIR, "--network", "tpu-v99"), "tpu-v99"),
    (("plan", *MESH, *PAIR, "--target-mesh", "x=4,y=2@many"), "the first device, such as 8 in z=4@8"),
    (("plan", *MESH, SOURCE, "{maximal device=0}"), "maximal"),
    (("show", *MESH, "f32[{x}4]", "--limit", "0"), "--limit 0"),
    (("plan", *MESH, *PAIR, "--tree"), "leave --tree out"),
    (("plan", *MESH, *PAIR, "--json", "--explain"), "leave one of them out"),
    (("plan", *MESH, *PAIR, "--size", "view=3"), "no atom can have this name"),
    (("plan", *MESH, *PAIR, "--size", "changed=3"), "no atom can have this name"),
    (("run", "-n", "2", "-m"), "nothing to run"),
    (("doctor", f"{ROOT}/tests/doctor/data/train_v5p_0.12.0.1.hlo", "--platform", "tpv"), "give one of cpu, gpu"),
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


COMMANDS = ("plan", "show", "simulate", "prove")


def _help(*command: str) -> str:
    command_parser = build_parser()
    for name in command:
        command_parser = command_parser._subparsers._group_actions[0].choices[name]
    return command_parser.format_help()


def _examples() -> list[str]:
    examples = []
    for text in (_help(), *(_help(name) for name in COMMANDS)):
        joined = text.replace("\\\n", " ")
        lines = (line for line in joined.splitlines() if re.match(rf"  reshard ({'|'.join(COMMANDS)}) ", line))
        examples += [line.strip() for line in lines]
    return examples


@pytest.mark.parametrize("name", ["doctor", "pass", "autoshard", "run", "calibrate"])
def test_the_other_examples_of_the_help_parse(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    examples = re.findall(rf"reshard ({name} .*)", _help(name).partition("examples:")[2])
    assert len(examples) >= 2
    for example in examples:
        parse_command(shlex.split(example))


@pytest.mark.parametrize("example", dict.fromkeys(_examples()))
def test_an_example_of_the_help_runs(call, example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Some examples write files, and some read this one.
    (tmp_path / "moves.jsonl").write_text('{"mesh": "x=4", "source": "f32[{x}4]", "target": "f32[16]"}\n')
    ran = call(*shlex.split(example)[1:], columns=60)
    assert (ran.code, ran.err) == (0, ""), ran.out
    assert max(map(len, ran.out.splitlines()), default=0) <= 60 or "--json" in example


def test_help_fits_60_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    texts = [_help(), *(_help(*name.split()) for name in find_commands(build_parser()))]
    assert [line for text in texts for line in text.splitlines() if len(line) > 60] == []


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ((), "COMMAND"),
        (("move",), "move"),
        (("plan", SOURCE), "TARGET"),
        (("plan", *PAIR, "--frobnicate"), "--frobnicate"),
        (("plan", *PAIR, "--mesh"), "--mesh"),
        (("show",), "LAYOUT"),
        (("-v", "plan", *PAIR), "plan -v ..."),
        (("simulate", *PAIR, "--seed", "x"), "--seed"),
    ],
)
def test_a_call_that_does_not_parse_exits_with_2(call, argv, word):
    ran = call(*argv)
    assert ran.code == 2
    assert word in ran.err


def test_every_command_stands_in_the_help():
    commands = build_parser()._subparsers._group_actions[0].choices
    about_plans = ["plan", "show", "simulate", "prove"]
    assert list(commands) == [
        *about_plans,
        "doctor",
        "pass",
        "autoshard",
        "run",
        "calibrate",
        "load",
        "files",
        "completion",
    ]
    assert all(f"    {name}" in build_parser().format_help() for name in commands)


def test_network_without_a_name_lists_the_presets(call):
    ran = call("plan", *PAIR, "--network")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["GB/s", *PRESETS]
    assert "tpu-v5p                    180             6.25" in ran.out


def test_verbose_says_what_is_done(call, caplog):
    assert call("plan", *MESH, *PAIR, "-v").code == 0
    assert any("planned" in record.message for record in caplog.records if record.name == "reshard")
    logging.getLogger("reshard").setLevel(logging.NOTSET)


def test_no_color_means_no_escape_codes(call, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in call("plan", *MESH, *PAIR).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in call("plan", *MESH, *PAIR).out


BASH = shutil.which("bash")

ASK = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_reshard; echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(BASH is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("reshard pl", "plan"),
        ("reshard plan --bu", "--budget"),
        ("reshard plan --network tpu-v5", "tpu-v5e tpu-v5p"),
        ("reshard run --", "--help --ranks --verbose"),
        ("reshard plan --batch mov", "moves.jsonl"),
    ],
)
def test_bash(call, tmp_path, words, completed):
    pytest.importorskip("shtab")
    (tmp_path / "moves.jsonl").touch()
    script = call("completion", "bash").out + ASK.format(words=words)
    run = subprocess.run([BASH, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == completed


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef reshard"), ("fish", "-l budget")])
def test_other_shells(call, shell, words):
    pytest.importorskip("shtab")
    ran = call("completion", shell)
    assert words in ran.out and "tpu-v5p" in ran.out and (ran.code, ran.err) == (0, "")


def test_without_shtab_the_message_names_the_extra(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    ran = call("completion", "bash")
    assert ran.code == 2 and "pip install shtab" in ran.err
