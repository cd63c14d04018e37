"""The recorded modules of `record_splices.py`, and the splices that the pass made in them."""

import json
from pathlib import Path
from typing import NamedTuple

from reshard.hlo.integrity import DoneSplice
from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import Linked, Splice, Splicer, Use

DATA = Path(__file__).resolve().parent / "data" / "splices"
NAMES = ("train_cpu", "scan_cpu", "train_v5p", "scan_v5p")


class Recorded(NamedTuple):
    """A module as XLA handed it over, its text, and what is to be spliced in."""

    module: bytes
    text: str
    splices: tuple[Splice, ...]

    def decoded(self) -> ModuleProto:
        """The module, decoded anew."""
        return ModuleProto.decode(self.module)


def recorded(name: str) -> Recorded:
    """The recorded module of that name."""
    described = json.loads((DATA / f"{name}.json").read_text())
    splices = tuple(
        Splice(
            one["region"],
            (one["source"],),
            tuple(Use(tuple(path), value) for path, value in one["uses"]),
            (DATA / f"{name}_{at}.pb").read_bytes(),
            b"\x12\x04here",
        )
        for at, one in enumerate(described)
    )
    return Recorded((DATA / f"{name}.pb").read_bytes(), (DATA / f"{name}.hlo").read_text(), splices)


def splice(module: ModuleProto, *changes: Splice) -> list[Linked]:
    """Splices fragments into one module, in place, one after another."""
    splicer = Splicer(module)
    linked = [splicer.splice(change) for change in changes]
    splicer.finish()
    return linked


def spliced_changes(module: ModuleProto, *changes: Splice) -> list[DoneSplice]:
    """Splices fragments into one module, in place: what to check it by."""
    return [DoneSplice(*each) for each in zip(changes, splice(module, *changes), strict=True)]
