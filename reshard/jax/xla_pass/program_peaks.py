"""The peak of a program that XLA is compiling, by compiling it again: as it is, and as the pass has rewritten it.

What a compiler makes of a module is known only once it has compiled it: it chooses an order, fuses, and lets buffers
share memory. So where no estimate shows that a rewritten program needs less, both are compiled, and the compiler says.
It says what they receive, too: XLA may make by itself what the pass has made, after the pass.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from reshard import hlo
from reshard.doctor.proposals import ProgramCost
from reshard.errors import SpliceError
from reshard.hlo import wire
from reshard.jax.xla_pass.compiling_thread import CompilingThread

_MODULE_ID, _FRAMES = 5, 17

Again = Callable[[], Any]
"""Compiles the program once more, and returns XLA's executable."""


class Peaks(Protocol):
    """The memory that a device holds at the peak of a program, and the bytes that it receives."""

    def of(self, module: bytes | None) -> ProgramCost:
        """The cost with this module in place of the program's own, None for that one."""
        ...


class Handed(NamedTuple):
    """What the pass answers to XLA."""

    module: bytes | None


@dataclass
class _PeakRun:
    """A program that is compiled only for its peak: the module that XLA will hand out, and what it is given back."""

    module: bytes
    instead: bytes | None
    handed_out: list[bytes] = field(default_factory=list[bytes])


_compiling = CompilingThread[_PeakRun]("reshard-peak")


class ProgramPeaks:
    """The peaks of the program that XLA has handed `module` out for; `known` has those that were compiled before."""

    def __init__(self, module: bytes, again: Again, known: dict[tuple[bytes, bytes], ProgramCost]) -> None:
        self._module = module
        self._again = again
        self._known = known

    def of(self, module: bytes | None) -> ProgramCost:
        """The cost with this module; raises `SpliceError` where it cannot be compiled again."""
        key = digest_module(self._module), b"" if module is None else digest_module(module)
        if key not in self._known:
            self._known[key] = self._compiled(_PeakRun(self._module, module))
        return self._known[key]

    def _compiled(self, one: _PeakRun) -> ProgramCost:
        try:
            cost = _compiling.run(one, lambda: _cost_of_program(self._again()))
        except Exception as error:  # XLA's errors have no class of their own.
            reason = str(error).partition("\n")[0]
            raise SpliceError(f"the program cannot be compiled for its peak ({reason})") from error
        if [digest_module(each) for each in one.handed_out] != [digest_module(one.module)]:
            raise SpliceError("the program cannot be compiled for its peak (XLA hands out another module)")
        return cost


def answer_to_xla(module: bytes) -> Handed | None:
    """What XLA gets back if this thread compiles a program for its peak; None if it does not."""
    one = _compiling.mark
    if one is None:
        return None
    one.handed_out.append(bytes(module))
    return Handed(one.instead)


def _cost_of_program(executable: Any) -> ProgramCost:
    """The cost of a program, from XLA's executable."""
    received = sum(hlo.traffic(hlo.parse(module.to_string())).received_bytes for module in executable.hlo_modules())
    return ProgramCost(compiled_peak_bytes(executable.get_compiled_memory_stats()), received)


def compiled_peak_bytes(memory: Any) -> int:
    """What the compiler says that a device holds at most.

    >>> from types import SimpleNamespace
    >>> compiled_peak_bytes(SimpleNamespace(argument_size_in_bytes=4, output_size_in_bytes=4, temp_size_in_bytes=8,
    ...                            alias_size_in_bytes=4))
    12
    """
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(total - memory.alias_size_in_bytes)


def digest_module(module: bytes) -> bytes:
    """A digest of a module without its number in this process and the source lines of its instructions."""
    message = wire.decode_message(module)
    message.remove(_MODULE_ID)
    message.remove(_FRAMES)
    return hashlib.sha256(wire.encode_message(message)).digest()
