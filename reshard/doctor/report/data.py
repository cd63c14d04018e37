"""The contents of a report: the places of a program, and its totals."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from reshard.doctor.memory import ProgramMemory
from reshard.doctor.places import Accounts, Place, accounts
from reshard.hlo import Traffic
from reshard.plans.plan_data import checked_indent
from reshard.types.whole import checked_flag


class CompiledMemory(NamedTuple):
    """The compiler's own account of a program's memory, in bytes on one device.

    >>> CompiledMemory(argument_bytes=8, output_bytes=4, temp_bytes=20, alias_bytes=3).peak_bytes
    29
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it; bytes that an output shares with an argument count once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True)
class ReportData:
    """The data of a `Report`, which adds the ways to print it.

    Each collective of the program is in exactly one of the places. `traffic` is what a device receives in one run:
    of the branches of a conditional, only the one that receives most counts. `compiled` is None if only the text of
    the program was given; `memory` is that of the text in its order.
    """

    program: str
    devices: int
    places: tuple[Place, ...]
    traffic: Traffic = field(repr=False)
    compiled: CompiledMemory | None = None
    memory: ProgramMemory = field(default=ProgramMemory(0, ()), repr=False)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives in one run."""
        return self.traffic.received_bytes

    @cached_property
    def wasted_bytes(self) -> int:
        """The bytes of these that are not needed, at most all of them."""
        return sum(place.wasted_bytes for place in self.places if place.counted)

    @cached_property
    def saved_bytes(self) -> int:
        """The bytes of these that the plans of `reshard` would save."""
        return sum(place.saved_bytes for place in self.places if place.counted)

    def accounts(self, every: bool = False) -> Accounts:
        """All received bytes in three lists: places, reductions and others; with `every`, all are places."""
        return accounts(self.places, self.received_bytes, checked_flag(every, "every"))

    @property
    def rebuilt(self) -> tuple[Place, ...]:
        """The places that make a whole array on every device, although each needs only a part."""
        return tuple(place for place in self.places if place.rebuilds_whole)

    def to_dict(self, every: bool = False) -> dict[str, Any]:
        """The report as plain data; bytes are those of one device.

        The `total_bytes` of the `counted` places and the `received_bytes` of `reductions` and `others` add up to the
        program's `received_bytes`. With `every`, each place is one of `places`, and nothing is summed.
        """
        accounts = self.accounts(every)
        return {
            "program": self.program,
            "devices": self.devices,
            "received_bytes": self.received_bytes,
            "launches": self.traffic.launches,
            "exact": self.traffic.exact,
            "wasted_bytes": self.wasted_bytes,
            "saved_bytes": self.saved_bytes,
            "rebuilt": len(self.rebuilt),
            "compiled": None if self.compiled is None else self.compiled._asdict(),
            "memory": self.memory.to_dict(),
            "places": [place.to_dict() for place in accounts.places],
            "reductions": [line.to_dict() for line in accounts.reductions],
            "others": [line.to_dict() for line in accounts.others],
        }

    def to_json(self, indent: int | None = None, every: bool = False) -> str:
        """The report as one JSON object, that of `to_dict`."""
        return json.dumps(self.to_dict(every), indent=checked_indent(indent))
