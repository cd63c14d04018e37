"""The help of every command: its examples run, and it fits a terminal of 60 columns."""

import logging
import re
import shlex

import pytest

import reshard as rs
from reshard.cli.parser import commands_of, parse, parser
from reshard.synth.network import PRESETS
from tests.cli.cases import MESH, SOURCE, TARGET

COMMANDS = ("plan", "show", "simulate", "prove")
PAIR = (SOURCE, TARGET)


def _help(*command: str) -> str:
    command_parser = parser()
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


def test_each_help_has_examples():
    for name in COMMANDS:
        assert sum(f"reshard {name} " in example for example in _examples()) >= 3


@pytest.mark.parametrize("example", dict.fromkeys(_examples()))
def test_an_example_of_the_help_runs(call, example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Some examples write files, and some read this one.
    (tmp_path / "moves.jsonl").write_text('{"mesh": "x=4", "source": "f32[{x}4]", "target": "f32[16]"}\n')
    ran = call(*shlex.split(example)[1:], columns=60)
    assert (ran.code, ran.err) == (0, ""), ran.out
    assert max(map(len, ran.out.splitlines()), default=0) <= 60 or "--json" in example


def test_help_fits_60_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    texts = [_help(), *(_help(name) for name in commands_of(parser()))]
    assert [line for text in texts for line in text.splitlines() if len(line) > 60] == []


def test_version(call):
    ran = call("--version")
    assert (ran.code, ran.out.strip()) == (0, f"reshard {rs.__version__}")


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


@pytest.mark.parametrize("name", ["doctor", "pass"])
def test_the_help_fits_and_its_examples_parse(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = _help(name)
    examples = [line.strip() for line in text.splitlines() if line.startswith(f"  reshard {name} ")]
    assert max(map(len, text.splitlines())) <= 80 and len(examples) >= 3
    for example in examples:
        assert parse(shlex.split(example)[1:]).options.file in ("step.mlir", "job.log") or "hlo" in example


@pytest.mark.parametrize("name", ["run", "calibrate"])
def test_the_examples_for_ranks_parse(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = _help(name)
    examples = re.findall(rf"reshard ({name} .*)", text.partition("examples:")[2])
    assert max(map(len, text.splitlines())) <= 80 and len(examples) >= 2
    for example in examples:
        assert parse(shlex.split(example)).options.ranks in (2, 4, 8, None)


def test_every_command_stands_in_the_help():
    commands = parser()._subparsers._group_actions[0].choices
    assert list(commands) == ["plan", "show", "simulate", "prove", "doctor", "pass", "run", "calibrate", "completion"]
    assert all(f"    {name}" in parser().format_help() for name in commands)


def test_network_without_a_name_lists_the_presets(call):
    ran = call("plan", *PAIR, "--network")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["GB/s", *PRESETS]
    assert "tpu-v5p                    180             6.25" in ran.out


def test_verbose_says_what_is_done(call, caplog):
    assert call("plan", *MESH, *PAIR, "-v").code == 0
    assert any("planned" in record.message for record in caplog.records if record.name == "reshard")
    logging.getLogger("reshard").setLevel(logging.NOTSET)


def test_what_follows_a_script_is_its_own():
    assert parse(["run", "-n", "2", "script.py", "--verson"]).options.arguments == ["script.py", "--verson"]


def test_no_color_means_no_escape_codes(call, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in call("plan", *MESH, *PAIR).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in call("plan", *MESH, *PAIR).out
