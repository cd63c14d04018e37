"""The pass on HLO in a file: text or a serialized proto in, and the same module out, better where it can be.

Fragments are compiled for devices of the platform that the module was compiled for, or ahead of time for a topology.
"""

# jaxlib's own modules have no stubs.

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from reshard import hlo
from reshard.doctor.places import Place
from reshard.errors import NotationError, ProgramError, quoted, shortened
from reshard.hlo.proto import ModuleProto
from reshard.jax.program_report import devices_for
from reshard.jax.request import options_on
from reshard.jax.xla_pass import xla_hook
from reshard.jax.xla_pass.fragments import print_module
from reshard.jax.xla_pass.hlo_pass import improve_module
from reshard.synth import Network
from reshard.types.whole import whole

_ELIDED = "({...})"
_READER = """
import sys
from jaxlib import _hlo
data = sys.stdin.buffer.read()
try:
    if sys.argv[1] == "str":
        data = _hlo.hlo_module_from_text(data.decode()).as_serialized_hlo_module_proto()
    _hlo.HloModule.from_serialized_hlo_module_proto(data).to_string()
    sys.stdout.buffer.write(data)
except Exception as error:
    sys.exit(str(error).splitlines()[0])
"""
_SCHEDULED = re.compile(r"\bis_scheduled=\s*true\b")


@dataclass(frozen=True)
class ImprovedHlo:
    """A module after the pass as a serialized HloModuleProto, and the place of each of its chains of collectives.

    `devices` is the number of its partitions; `unscheduled` says that it had a schedule, which the compiler has to
    make anew.
    """

    proto: bytes
    places: tuple[Place, ...]
    devices: int
    unscheduled: bool

    @property
    def text(self) -> str:
        """The text of the module, large constants and the number of partitions included."""
        head, line, rest = print_module(self.proto).partition("\n")
        return f"{head}, num_partitions={self.devices}{line}{rest}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "devices": self.devices,
            "unscheduled": self.unscheduled,
            "chains": [place.to_pass_dict() for place in self.places],
        }


def improve_hlo(
    program: str | bytes,
    *,
    devices: int | None = None,
    platform: str = "cpu",
    topology: str | None = None,
    network: Network | str | None = None,
    budget: int | str | None = None,
    prefer: str = "bytes",
    sums: str = "exact",
) -> ImprovedHlo:
    """The pass on HLO after SPMD partitioning: text, or the bytes of an HloModuleProto.

    `devices` is the number of partitions, where the module does not say. `platform` and `topology` name the devices
    that it is for, `network`, `budget`, `prefer` and `sums` are those of `enable`. Raises `ProgramError` where the
    devices cannot be had, and `NotationError` for a program that is not HLO.
    """
    given, written, scheduled = whole(devices, 1), None, False
    if not isinstance(program, str):
        module = _read_by_xla(program)
    elif _ELIDED in program:
        raise NotationError(
            "the HLO text leaves large constants out (`constant({...})`); print it with large constants, or give the "
            "serialized proto: compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()"
        )
    else:
        written = hlo.parse(program).num_partitions
        try:
            module = _read_by_xla(program)
        except NotationError:
            # XLA ends its process at a schedule that is out of order, which some of its own texts have.
            text, scheduled = _SCHEDULED.subn("is_scheduled=false", program)
            if not scheduled:
                raise
            module = _read_by_xla(text)
    # What the module's text says, else what the caller does.
    if devices is not None and given is None:
        raise ProgramError(f"devices {quoted(devices)}: give the number of the module's partitions, 1 or more")
    if None not in (written, given) and written != given:
        raise ProgramError(f"devices {given}: the module itself says that it has {written} partitions; leave it out")
    partitions = written or given
    if partitions is None:
        raise ProgramError("the module does not say for how many devices it is; say so: --devices 8")
    chosen = devices_for(partitions, platform, topology)
    options = xla_hook.prepare_pass(network, budget, prefer, sums=sums).options
    options = options._replace(plan=options_on(chosen, options.plan))
    decoded = ModuleProto.decode(module)
    dropped = bool(scheduled) or (decoded.schedule is not None and platform != "tpu")
    ready = module
    if dropped and decoded.schedule is not None:  # As it is before scheduling, where CPU and GPU hand it to the pass.
        decoded.remove_schedule()
        ready = decoded.encode()
    improved = improve_module(ready, xla_hook.fragments_of(chosen), options)
    if improved.module is None:
        return ImprovedHlo(module, improved.places, partitions, bool(scheduled))
    return ImprovedHlo(improved.module, improved.places, partitions, dropped)


def _read_by_xla(program: str | bytes) -> bytes:
    """The serialized module of a text, or one as it is, read by XLA in a process of its own.

    At many a damaged one (a parameter out of range, a negative tile) XLA's reader ends its process by a CHECK.
    """
    given = program.encode(errors="replace") if isinstance(program, str) else program
    command = [sys.executable, "-c", _READER, type(program).__name__]
    ran = subprocess.run(command, input=given, capture_output=True, check=False)
    if ran.returncode:
        lines = ran.stderr.decode(errors="replace").splitlines()
        why = next((line for line in lines if "Check failed" in line), lines[-1] if lines else "it gives no reason")
        what = "HLO text" if isinstance(program, str) else "HLO"
        raise NotationError(f"XLA does not read the {what}: {shortened(why)}")
    return ran.stdout
