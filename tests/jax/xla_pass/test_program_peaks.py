"""The peak of a program by compiling it again, with a compiler that is a stand-in for XLA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reshard.errors import SpliceError
from reshard.hlo import wire
from reshard.jax.xla_pass import program_peaks
from reshard.jax.xla_pass.program_peaks import ProgramPeaks


def module(name: str, number: int) -> bytes:
    """A module of that name, with the number that a process gives it, and lines that it was traced from."""
    message = wire.ProtoMessage([])
    message.set_data(1, name.encode())
    message.set_number(5, number)
    message.set_data(17, f"train.py:{number}".encode())
    return wire.encode_message(message)


TEXT = """HloModule m, num_partitions=4

ENTRY %main {
  %p = f32[2,8]{1,0} parameter(0)
  ROOT %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}
"""


class Xla:
    """Hands out a module, and needs as many bytes as the name of the one that it compiles is long."""

    def __init__(self, hands_out: bytes, times: int = 1) -> None:
        self.hands_out = hands_out
        self.times = times
        self.compiled: list[str] = []

    def __call__(self) -> Any:
        answers = [program_peaks.answer_to_xla(self.hands_out) for _ in range(self.times)]
        instead = answers[0].module if answers and answers[0] else None
        name = wire.decode_message(instead or self.hands_out).text(1)
        self.compiled.append(name)
        sizes = {"argument_size_in_bytes": 0, "output_size_in_bytes": 0, "alias_size_in_bytes": 0}
        memory = SimpleNamespace(temp_size_in_bytes=len(name), **sizes)
        text = SimpleNamespace(to_string=lambda: TEXT)
        return SimpleNamespace(get_compiled_memory_stats=lambda: memory, hlo_modules=lambda: [text])


def test_both_programs_are_compiled_once() -> None:
    xla, known = Xla(module("plain", 2)), {}
    peaks = ProgramPeaks(module("plain", 1), xla, known)
    costs = [peaks.of(None), peaks.of(module("better", 3)), peaks.of(None)]
    assert [(cost.peak_bytes, cost.received_bytes) for cost in costs] == [(5, 192), (6, 192), (5, 192)]
    later = ProgramPeaks(module("plain", 7), xla, known)
    assert [later.of(None), later.of(module("better", 8))] == costs[:2]
    assert xla.compiled == ["plain", "better"]


@pytest.mark.parametrize("xla", [Xla(module("other", 1)), Xla(module("plain", 1), 2), Xla(module("plain", 1), 0)])
def test_another_module_than_before_is_refused(xla: Xla) -> None:
    with pytest.raises(SpliceError, match="XLA hands out another module"):
        ProgramPeaks(module("plain", 1), xla, {}).of(module("better", 1))


def test_an_error_of_the_compiler_is_refused() -> None:
    def again() -> Any:
        raise RuntimeError("out of memory\nat length")

    with pytest.raises(SpliceError, match=r"cannot be compiled for its peak \(out of memory\)"):
        ProgramPeaks(module("plain", 1), again, {}).of(None)


def test_other_threads_compile_with_the_pass() -> None:
    assert program_peaks.answer_to_xla(module("plain", 1)) is None
