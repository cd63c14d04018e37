"""What Tab completes, as bash itself says; and the scripts of the other shells."""

import shutil
import subprocess
import sys

import pytest

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
    assert ran.code == 2 and "pip install 'reshard[completion]'" in ran.err
