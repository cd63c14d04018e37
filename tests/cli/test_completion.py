"""What Tab completes, as bash itself says; and the scripts of the other shells."""

import shutil
import subprocess

import pytest

BASH = shutil.which("bash")
ASK = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_reshard; echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(BASH is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("reshard pl", "plan"),
        ("reshard plan --bu", "--budget"),
        ("reshard plan --network tpu-v5", "tpu-v5e tpu-v5p"),
        ("reshard run --", "--help --ranks --verbose"),
        ("reshard show ''", "moves.jsonl"),
    ],
)
def test_bash(call, tmp_path, words, completed):
    (tmp_path / "moves.jsonl").touch()
    script = call("completion", "bash").out + ASK.format(words=words)
    run = subprocess.run([BASH, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == completed


def test_other_shells(call):
    assert call("completion", "zsh").out.startswith("autoload -U +X bashcompinit && bashcompinit\n")
    fish = call("completion", "fish").out.splitlines()
    assert "complete -c reshard -n '__fish_seen_subcommand_from plan' -l budget" in fish
    assert any("-l network -x -a 'tpu-v4 " in line for line in fish)
