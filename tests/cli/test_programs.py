"""Programs are told apart by their contents, not by their names."""

import io
import os
import sys
import threading

import pytest

from reshard.cli import programs
from reshard.cli.programs import read_program, set_up_jax, write_output
from reshard.errors import NotationError, ReshardError
from reshard.types import input_files
from tests.cli.compiled import COMPILED, GATHERED, MODULE, NOTHING


@pytest.mark.parametrize("argv", [["doctor", "none.hlo"], ["pass", "none.mlir"]])
def test_a_file_that_is_not_there(call, argv):
    code, _, err = call(*argv)
    assert code == 2 and "cannot read none" in err and "No such file" in err


@pytest.mark.parametrize(("path", "is_hlo"), [(COMPILED, True), (MODULE, False)])
def test_text_is_hlo_or_mlir(tmp_path, path, is_hlo):
    copy = tmp_path / "program"
    copy.write_bytes(path.read_bytes())
    assert read_program(str(copy)) == (path.read_text(), is_hlo, False)


def test_of_a_dump_the_program_is_read_of_which_a_device_receives_most(call, tmp_path):
    """Of three programs of a dump: the heavier one by name is neither the first nor the last."""
    code, _, err = call("doctor", str(tmp_path))
    assert code == 2 and "has no file *after_optimizations.txt, as --xla_dump_to writes" in err
    for name in ("module_0000.jit_init", "module_0002.jit_eval"):
        (tmp_path / f"{name}.cpu_after_optimizations.txt").write_text(NOTHING)
    (tmp_path / "module_0001.jit_step.cpu_after_optimizations.txt").write_bytes(COMPILED.read_bytes())
    (tmp_path / "module_0003.jit_step.before_optimizations.txt").write_bytes(COMPILED.read_bytes() * 2)
    code, out, err = call("doctor", str(tmp_path), "--fail-on-rebuild")
    assert (code, out) == (1, call("doctor", str(COMPILED))[1])
    assert err.endswith("jit_step.cpu_after_optimizations.txt: the one of 3 programs of which a device receives most\n")
    gathered = tmp_path / "module_0004.jit_save.cpu_after_optimizations.txt"
    gathered.write_text(GATHERED)
    code, out, err = call("doctor", str(tmp_path))
    assert (code, out) == (0, call("doctor", str(COMPILED))[1])
    assert err.splitlines()[1:] == [f"reshard: {gathered.name}: 192 B received, 1 collective"]
    code, both, err = call("doctor", gathered, COMPILED)
    assert (code, both) == (0, out) and f"{COMPILED}: the one of 2 programs" in err and gathered.name in err
    assert "give it alone" in call("doctor", COMPILED, MODULE)[2]


def test_a_module_that_is_not_partitioned_yet_is_no_program_that_moves_nothing(call, tmp_path):
    constrained = NOTHING.replace(
        "ROOT", '%c = f32[4]{0} custom-call(%p), custom_call_target="Sharding", sharding={devices=[2]<=[2]}\n  ROOT', 1
    )
    (tmp_path / "before.txt").write_text(constrained)
    code, out, err = call("doctor", str(tmp_path / "before.txt"))
    assert (code, out) == (2, "") and "XLA has not partitioned it" in err and "after_optimizations.txt" in err


def test_stdin_and_stdout_are_dashes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(NOTHING.encode())))
    assert read_program("-").text == NOTHING
    write_output("-", "text\n")
    assert capsys.readouterr().out == "text\n"


def test_a_file_without_an_end_is_not_read_to_it(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "MOST_BYTES", 64)
    monkeypatch.setattr(programs, "_PART", 16)
    (tmp_path / "long").write_bytes(b"x" * 81)
    with pytest.raises(NotationError, match="long has more than 64 B, and no program does"):
        read_program(str(tmp_path / "long"))
    (tmp_path / "long").write_text("HloModule ".ljust(64))
    assert read_program(str(tmp_path / "long")).is_hlo


ENDLESS = {
    ("doctor", "{pipe}"): "a pipe that no process writes to",
    ("pass", "{pipe}"): "a pipe that no process writes to",
    ("plan", "--batch", "{pipe}"): "a pipe that no process writes to",
    ("plan", "--mesh", "x=2", "f32[{{x}}4]", "f32[8]", "--network", "{pipe}"): "a pipe that no process writes to",
    ("run", "-n", "2", "{pipe}"): "there is no script",
    ("doctor", "/dev/zero"): "a part of null bytes, and no program does",
    ("doctor", "{hole}"): "a part of null bytes, and no program does",
    ("plan", "--batch", "{hole}"): "a line above 1048576 characters",
}


@pytest.mark.parametrize("words", ENDLESS, ids=" ".join)
def test_what_has_no_end_or_no_writer_is_refused(call, monkeypatch, tmp_path, words):
    monkeypatch.setattr(input_files, "PATIENCE", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(20 << 30)
    code, out, err = call(*(word.format(pipe=tmp_path / "pipe", hole=tmp_path / "hole") for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1) and ENDLESS[words] in err


def test_a_pipe_is_read_once_someone_writes_to_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Timer(0.1, (tmp_path / "pipe").write_text, [NOTHING])
    writer.start()
    assert read_program(str(tmp_path / "pipe")).text == NOTHING
    writer.join()


def test_bytes_and_text_are_written_as_they_are(tmp_path):
    for content in ("päge", b"\x00\xff"):
        write_output(str(tmp_path / "file"), content)
        wanted = content.encode() if isinstance(content, str) else content
        assert (tmp_path / "file").read_bytes() == wanted
    with pytest.raises(ReshardError, match=r"cannot write .*none.*: No such file"):
        write_output(str(tmp_path / "none" / "file"), "")


def test_the_users_settings_of_jax_stay(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD")
    set_up_jax()
    assert (os.environ["JAX_PLATFORMS"], os.environ["TF_CPP_MIN_LOG_LEVEL"]) == ("tpu", "2")
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD" not in os.environ
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    set_up_jax()
    assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
