"""What a compiler says of a program that never runs: the memory that a device needs, and what it receives.

XLA:CPU spends most of its time on machine code, which nobody asks for here. Before that it has put the instructions in
order and has given each result its memory, and that is all that a peak depends on. So the compilation is stopped there:

    our pass, after scheduling      an instruction that no machine code can be made of is put first
    XLA                             assigns the buffers, writes them to a file (`xla_dump_to`), and gives up

The instruction yields a token, of no bytes, once the order is fixed: it changes nothing for the others. Where another
version of XLA does something else, the program is compiled to its end.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reshard import hlo
from reshard.hlo import Traffic, wire
from reshard.hlo.proto import InstructionProto, ModuleProto
from reshard.hlo.wire import ProtoMessage

QUICKER: Mapping[str, Mapping[str, Any]] = {"cpu": {"xla_backend_optimization_level": 0}}
"""Options that make worse machine code in half the time, of what never runs: modules and peaks are the same."""
_STOP = "reshard_stops_here"
_TOKEN, _TARGET, _API, _TYPED_FFI = 17, 28, 77, 4  # of hlo.proto and xla_data.proto
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
_COUNTED = ("parameter ", "maybe-live-out", "preallocated-temp")  # A result that is an argument's is one allocation.

_stopping = threading.local()
Compile = Callable[[Mapping[str, Any]], Any]
"""Compiles a program with some of XLA's options, and returns its executable."""


class CompiledFigures(NamedTuple):
    """The memory that a device holds at most, arguments and results included, and the texts of the compiled modules."""

    peak_bytes: int
    texts: tuple[str, ...]

    def read_traffic(self) -> list[Traffic]:
        """What each module receives; a long text takes a while to read."""
        return [hlo.traffic(hlo.parse(text)) for text in self.texts]


def measure_program(platform: str, compile_it: Compile) -> CompiledFigures:
    """The figures of a program, as compiled for a platform; raises what the compiler raises."""
    options = QUICKER.get(platform, {})
    if platform != "cpu":
        return read_executable(compile_it(options))
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        _stopping.is_on = True
        try:
            executable = compile_it({**options, "xla_dump_to": folder, "xla_dump_disable_metadata": True})
        except Exception as error:  # XLA's errors have no class of their own.
            if _STOP not in str(error):
                raise
            figures = _read_dump(Path(folder))
        else:  # It did not stop, so there is more to read than files.
            return read_executable(executable)
        finally:
            _stopping.is_on = False
    return read_executable(compile_it(options)) if figures is None else figures


def stop_compilation(module: bytes) -> bytes | None:
    """Called by XLA:CPU with each module once it is scheduled: an instruction first stops its compilation.

    None if this thread's goes on.
    """
    if not getattr(_stopping, "is_on", False):
        return None
    proto = ModuleProto.decode(module)
    entry, token, stop = proto.entry, ProtoMessage([]), InstructionProto(ProtoMessage([]))
    token.set_number(2, _TOKEN)
    stop.name, stop.opcode, stop.shape = "reshard.stop", "custom-call", wire.encode_message(token)
    stop.id, stop.side_effect = entry.new_ids(1)[0], 1
    stop.message.set_data(_TARGET, _STOP.encode())
    stop.message.set_number(_API, _TYPED_FFI)
    entry.instructions.insert(0, stop)
    if proto.schedule is not None:
        proto.schedule[entry.id].insert(0, stop.id)
    return proto.encode()


def _read_dump(folder: Path) -> CompiledFigures | None:
    """The figures of the one program that XLA has written to a folder; None if that is not what it wrote."""
    names = ("*after_optimizations-buffer-assignment.txt", "*after_optimizations.txt")
    files = [list(folder.glob(name)) for name in names]
    if [len(each) for each in files] != [1, 1]:
        return None
    # allocation 0: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
    buffers, text = (each[0].read_text() for each in files)
    allocations = _ALLOCATION.findall(buffers)
    peak = sum(int(size) for size, said in allocations if any(kind in said for kind in _COUNTED))
    return CompiledFigures(peak, (text,)) if allocations else None


def read_executable(executable: Any) -> CompiledFigures:
    """The figures of XLA's executable."""
    memory = executable.get_compiled_memory_stats()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    texts = tuple(one.to_string() for one in executable.hlo_modules())
    return CompiledFigures(int(peak - memory.alias_size_in_bytes), texts)
