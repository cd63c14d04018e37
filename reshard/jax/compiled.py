"""`Compiled`, a program that `jit` has compiled: with our collectives or without, and as bytes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import serialize_executable as _serialize_executable

from reshard.errors import ProgramError, quoted
from reshard.jax.doctor import devices_of_program, optimized_text
from reshard.jax.pass_report import Decision, PassReport
from reshard.jax.strict import Limits, check_limits

_jax: Any = jax  # Its own stubs leave too much unknown.
_serialize: Any = _serialize_executable


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program; call it with the arguments that it was lowered for, without the static ones.

    `executable` is JAX's own `jax.stages.Compiled`, `decision` says whether it runs our collectives and why, and
    `report` what was done with each of the program's reshards.

    >>> from reshard.jax import jit
    >>> compiled = jit(lambda x: 2 * x).lower(4.0).compile()
    >>> float(compiled(5.0)), str(compiled.decision)
    (10.0, 'plain: it runs on one device')
    """

    executable: Any
    decision: Decision
    report: PassReport

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.executable(*args, **kwargs)

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        """The compiler's own figures for its memory, in bytes per device."""
        return self.executable.memory_analysis()

    def cost_analysis(self) -> Any:
        """The compiler's own figures for its arithmetic."""
        return self.executable.cost_analysis()

    @property
    def input_shardings(self) -> Any:
        """The shardings of the arguments: a tuple for the positional ones and a dict for those by name."""
        return self.executable.input_shardings

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results."""
        return self.executable.output_shardings

    def check(self, limits: Limits) -> None:
        """Raises `StrictError` if the program exceeds the limits of strict mode."""
        if limits == Limits():
            return
        temp = int(self.memory_analysis().temp_size_in_bytes)
        check_limits(optimized_text(self.executable), self.report, limits, temp)

    def serialize(self) -> bytes:
        """The compiled program as bytes, for `deserialize` under the same jax on devices of the same kind."""
        devices = [device.id for device in devices_of_program(self.executable)]
        return pickle.dumps((devices, *_serialize.serialize(self.executable), self.decision, self.report))


def deserialize(data: bytes) -> Compiled:
    """The compiled program from the bytes of `Compiled.serialize`; they are a pickle, so load only what you trust.

    It runs on the devices that it was compiled for. Raises `ProgramError` if the process does not have them, or if the
    bytes are not those of `serialize` under this version.

    >>> from reshard.jax import jit
    >>> data = jit(lambda x: 2 * x).lower(4.0).compile().serialize()
    >>> float(deserialize(data)(4.0))
    8.0
    """
    try:
        ids, *parts, decision, report = pickle.loads(data)
        known = {device.id: device for device in _jax.devices()}
        missing = [each for each in ids if each not in known]
    except Exception as error:  # Unpickling can raise anything.
        raise ProgramError(f"the bytes are not those of a compiled program's serialize(): {error}") from None
    if missing:
        raise ProgramError(
            f"the program was compiled for devices {quoted(ids)}, and this process has no {quoted(missing)} among its "
            f"{len(known)}; load it where the devices have the same ids, or compile it again"
        )
    # JAX itself would load it for all devices of the process, and abort the process where these are more.
    loaded = _serialize.deserialize_and_load(*parts, execution_devices=[known[each] for each in ids])
    return Compiled(loaded, decision, report)
