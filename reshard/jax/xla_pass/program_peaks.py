"""Compilations that the pass starts while XLA is compiling; and the peak of the program that it is compiling, by one.

XLA calls the pass with their modules, too, in the thread that compiles them. So each has a thread of its own, which
carries a mark by which the pass knows what such a module is for.

What a compiler makes of a module is known only once it has compiled it: it chooses an order, fuses, and lets buffers
share memory. So where no estimate shows that a rewritten program needs less, it is compiled as it is and as the pass
has rewritten it, and the compiler says. It says what they receive, too: XLA may make by itself what the pass has made,
after the pass.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from reshard import hlo
from reshard.doctor.proposals import ProgramCost
from reshard.errors import SpliceError
from reshard.hlo import Module, wire
from reshard.jax.xla_pass.measured_programs import Compile, measure_program

MODULE_ID, _FRAMES = 5, 17
Mark = TypeVar("Mark")
Result = TypeVar("Result")


class CompilingThread(Generic[Mark]):
    """Threads that compile for one purpose, and say so by a mark.

    >>> threads = CompilingThread[str]("example")
    >>> threads.run("a mark", lambda: threads.mark), threads.mark
    ('a mark', None)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._local = threading.local()

    @property
    def mark(self) -> Mark | None:
        """The mark of the thread that asks; None if it is another one."""
        return getattr(self._local, "mark", None)

    def run(self, mark: Mark, work: Callable[[], Result]) -> Result:
        """Runs in a new thread, where neither the caller's jax contexts nor its meshes hold; raises what it raises."""
        results: list[Result] = []
        errors: list[Exception] = []

        def marked() -> None:
            self._local.mark = mark
            try:
                results.append(work())
            except Exception as error:  # XLA's errors have no class of their own.
                errors.append(error)

        thread = threading.Thread(target=marked, name=self._name)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


@dataclass
class _PeakRun:
    """A program that is compiled only for its peak: the module that XLA will hand out, and what it is given back."""

    module: bytes
    instead: bytes | None
    handed_out: list[bytes] = field(default_factory=list[bytes])


_compiling = CompilingThread[_PeakRun]("reshard-peak")


class ProgramPeaks:
    """The peaks of the program that XLA has handed `module` out for; `known` has those that were compiled before.

    `again` compiles it once more for the platform.
    """

    def __init__(
        self, module: bytes, again: Compile, known: dict[tuple[bytes, bytes], ProgramCost], platform: str = ""
    ) -> None:
        self.module = module
        self._again = again
        self._known = known
        self._platform = platform

    def of(self, module: bytes | None, read: Module | None = None) -> ProgramCost:
        """The memory that a device holds at most, and the bytes that it receives, with this module in place of the
        program's own, None for that one; raises `SpliceError` where it cannot be compiled again.

        What is received is counted in the module as it was `read`, where the compiler has made all collectives by then.
        """
        own = digest_module(self.module)
        key = own, b"" if module is None else digest_module(module)
        if key not in self._known:
            one = _PeakRun(self.module, module)

            def compile_it(options: Mapping[str, Any]) -> Any:
                one.handed_out.clear()
                return self._again(options)

            try:
                figures = _compiling.run(one, lambda: measure_program(self._platform, compile_it))
                final = read if self._platform == "cpu" else None
                traffic = figures.read_traffic() if final is None else [hlo.traffic(final)]
                received = sum(each.received_bytes for each in traffic)
                cost = ProgramCost(figures.peak_bytes, received)
            except Exception as error:  # XLA's errors have no class of their own.
                reason = str(error).partition("\n")[0]
                raise SpliceError(f"the program cannot be compiled for its peak ({reason})") from error
            if list(map(digest_module, one.handed_out)) != [own]:
                raise SpliceError("the program cannot be compiled for its peak (XLA hands out another module)")
            self._known[key] = cost
        return self._known[key]


def answer_to_xla(module: bytes) -> tuple[bytes | None] | None:
    """What XLA gets back, alone in a tuple, if this thread compiles a program for its peak; None if it does not."""
    one = _compiling.mark
    if one is None:
        return None
    one.handed_out.append(bytes(module))
    return (one.instead,)


def digest_module(module: bytes, with_lines: bool = False) -> bytes:
    """A digest of a module without its number in this process and, unless `with_lines`, its table of source lines."""
    message = wire.decode_message(module)
    message.remove(MODULE_ID)
    if not with_lines:
        message.remove(_FRAMES)
    return hashlib.sha256(wire.encode_message(message)).digest()
