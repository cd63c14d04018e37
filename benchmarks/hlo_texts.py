"""HLO texts of a folder of sources: how many our reader takes of those that XLA's own parser takes, and reads alike.

    python benchmarks/hlo_texts.py ~/src/xla
    python benchmarks/hlo_texts.py ~/src/xla --mutants 20000 --seed 1

Texts are the raw strings `R"(...)"` of C++ sources that have an `HloModule` in them, and `.hlo` files, cut at their
`// -----`. The judge is `jaxlib`, in a process of its own that may abort. A text that it takes is read twice, by
`hlo.parse` from the text and from what the judge prints of what it made of it, and the two modules are compared:
computations, instructions, opcodes, shapes with their memory layouts, operands, called computations, attributes, whole
constants, lines, and the collectives.

`--mutants` changes a few characters of texts: only a `ReshardError` may come of it, and what the judge takes is
compared.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fuzz_faults import mutated_text
from reshard import hlo
from reshard.errors import ReshardError
from reshard.hlo.instruction import Instruction, Shape
from reshard.hlo.module import Computation, Module

_RESHAPED = ("send", "send-done", "recv", "recv-done", "outfeed")
"""XLA works out their shapes, whatever a text says."""
_FILLED_IN = (
    ("broadcast", "dimensions"), ("map", "dimensions"), ("reshape", "dimensions"), ("topk", "is_stable"),
    ("collective-permute", "dynamic_slice_sizes"), ("collective-permute-start", "dynamic_slice_sizes"),
)  # fmt: skip
_RAW = re.compile(r'R"([^\s()\\]{0,16})\((.*?)\)\1"', re.S)
_SPLIT = re.compile(r"^// -----.*$", re.M)
_JUDGE = """
import base64, json, sys
from jaxlib import _hlo
texts = json.load(open(sys.argv[1]))
options = _hlo.HloPrintOptions()
options.print_large_constants = True
for at in range(int(sys.argv[2]), len(texts)):
    try:
        made = _hlo.hlo_module_from_text(texts[at]).to_string(options)
        print(at, base64.b64encode(made.encode()).decode(), flush=True)
    except Exception as error:
        print(at, "-", flush=True)
"""
ATTRIBUTES = (
    "dimensions", "slice", "padding", "source_target_pairs", "channel_id", "use_global_device_ids", "direction",
    "iota_dimension", "index", "fft_type", "fft_length", "custom_call_target", "dynamic_slice_sizes", "replica_groups",
    "device_ids", "kind", "is_stable",
)  # fmt: skip
"""What our readers read of attributes, apart from the names of computations."""


def texts_of(folder: Path) -> list[str]:
    """The HLO texts below a folder, each once."""
    found: dict[str, None] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".cc", ".h", ".hlo", ".txt") or not path.is_file():
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        whole = [match[2] for match in _RAW.finditer(source)] if path.suffix in (".cc", ".h") else [source]
        parts = (part for one in whole for part in _SPLIT.split(one) if "HloModule" in part)
        found |= dict.fromkeys(parts)
    return list(found)


def judged(texts: Sequence[str]) -> list[bytes | str]:
    """What XLA prints of what its parser makes of each text; `refused`, or `aborted` where it ends its process."""
    verdicts: list[bytes | str] = []
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "texts.json"
        listed.write_text(json.dumps(list(texts)))
        while len(verdicts) < len(texts):
            command = [sys.executable, "-c", _JUDGE, str(listed), str(len(verdicts))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            for line in done.stdout.splitlines():
                _, made = line.split(" ")
                verdicts.append("refused" if made == "-" else base64.b64decode(made))
            if len(verdicts) < len(texts):
                verdicts.append("aborted")
    return verdicts


def difference(text: Module, printed: Module) -> str | None:
    """The first thing in which two readings of a module differ; None if they do not.

    XLA names instructions anew where a name is taken, so they are paired by what they are for: roots with roots,
    operands with operands.
    """
    if text.name != printed.name:
        return f"name: {text.name} | {printed.name}"
    return _Pairs(text, printed).difference()


class _Pairs:
    """Computations of a text, paired with those that XLA prints."""

    def __init__(self, text: Module, printed: Module) -> None:
        self.text, self.printed = text, printed
        self.done: set[str] = set()
        self.wrapped: set[str] = set()

    def difference(self) -> str | None:
        queue = [(self.text.entry, self.printed.entry)]
        while queue:
            mine, its = queue.pop()
            if mine.name in self.done:
                continue
            self.done.add(mine.name)
            for one, other in self.pairs(mine, its):
                if found := self.of_instructions(one, other):
                    return f"{one.opcode}: {found}"
                if one.opcode.startswith("async-"):
                    roots = (self.text.computation(name).root for name in one.called)
                    self.wrapped.update(root.name for root in roots if root is not None)
                    continue
                called = zip(one.called, other.called, strict=False)
                queue += [(self.text.computation(a), self.printed.computation(b)) for a, b in called]
            if len(mine.instructions) != len(its.instructions):
                return f"instructions: {len(mine.instructions)} | {len(its.instructions)}"
        return None

    def pairs(self, mine: Computation, its: Computation) -> Iterator[tuple[Instruction, Instruction]]:
        """Instructions that belong together: by their names, else by their places."""
        seen: set[str] = set()
        named = [(one, its.by_name[one.name]) for one in mine.instructions if one.name in its.by_name]
        stack: list[tuple[Instruction | None, Instruction | None]] = [*named, (mine.root, its.root)]
        while stack:
            one, other = stack.pop()
            if one is None or other is None or one.name in seen:
                continue
            seen.add(one.name)
            yield one, other
            operands = zip(one.operands, other.operands, strict=False)
            stack += [(mine.by_name.get(a), its.by_name.get(b)) for a, b in operands]

    def of_instructions(self, one: Instruction, other: Instruction) -> str | None:
        """In what two instructions differ.

        XLA prints an `async-start` that runs one instruction as that instruction's start: its opcode and what it does
        are then the other's.
        """
        wraps = any(each.opcode.startswith("async-") for each in (one, other))
        ends = one.opcode.endswith(("-done", "-update"))
        opcodes = (one.opcode.rpartition("-")[2 if wraps else 0], other.opcode.rpartition("-")[2 if wraps else 0])
        sides: list[tuple[Any, Any]] = [opcodes if wraps else (one.opcode, other.opcode), (one.root, other.root)]
        sides += [(len(one.operands), len(other.operands))]
        if one.opcode not in _RESHAPED:
            sides += [(one.is_array, other.is_array), (*_laid_out(one.shape, other.shape),)]
        whole = one.opcode == "constant" and one.is_array and re.match(r"[su]\d|pred", one.arrays[0].dtype)
        if one.opcode == "parameter" or (whole and "..." not in one.literal + other.literal):
            texts = [
                re.sub("true|false", lambda found: str(int(found[0] == "true")), each.literal) for each in (one, other)
            ]
            numbers = [[int(number) for number in re.findall(r"-?\d+", each)] for each in texts]
            # XLA takes 0 for numbers that a text leaves out, and a number of 64 bits with either sign.
            sides.append(
                (
                    [number % (1 << 64) for number in numbers[0]],
                    [number % (1 << 64) for number in numbers[1]][: len(numbers[0])],
                )
            )
        sources = [
            m.frames.source(i.metadata) if i.metadata else None for m, i in ((self.text, one), (self.printed, other))
        ]
        sides.append((str(sources[0]).replace("\\", ""), str(sources[1]).replace("\\", "")))
        if not wraps and not ends:
            sides.append((len(one.called), len(other.called)))
            for key in ATTRIBUTES:
                mine, its = (_plain(one.opcode, key, side.attributes.get(key)) for side in (one, other))
                sides.append((f"{key}={mine}", f"{key}={its}"))
            mine, its = (side.attributes.get("frontend_attributes", "") for side in (one, other))
            if mine or one.name not in self.wrapped:
                sides.append((_frontend(mine), _frontend(its)))
        return next((f"{mine!s:.200} | {its!s:.200}" for mine, its in sides if mine != its), None)


def _frontend(text: str) -> list[str]:
    """Frontend attributes in order, without quotes and blanks: XLA prints a value that is a dict without quotes."""
    return sorted(
        "".join(one.replace("\\", "").replace('"', "").split()) for one in re.split(r",(?=\s*[\w.\-]+=)", text[1:-1])
    )


def _plain(opcode: str, key: str, value: str | None) -> Any:
    """The value of an attribute, the same where XLA takes it for the same; None for what XLA adds or leaves out."""
    if (opcode, key) in _FILLED_IN or value in (None, "false", "{}") or (key, value) == ("channel_id", "0"):
        return None
    if key == "replica_groups" and value[0] in "[{":
        return hlo.parse_groups(value, 1).lists
    if key == "slice":
        return [(start, limit, step or "1") for start, limit, step in re.findall(r"(\d+):(\d+):?(\d*)", value)]
    if key == "padding":
        return [edge.removesuffix("_0") if edge.count("_") == 2 else edge for edge in value.split("x")]
    return value.replace(" ", "")


def _laid_out(shape: Shape, other: Shape) -> tuple[Any, Any]:
    """Two shapes; a memory layout that the first does not say is XLA's own, and stands in neither."""
    if isinstance(shape, tuple) or isinstance(other, tuple):
        if not isinstance(shape, tuple) or not isinstance(other, tuple) or len(shape) != len(other):
            return shape, other
        pairs = [_laid_out(*each) for each in zip(shape, other, strict=True)]
        return [a for a, _ in pairs], [b for _, b in pairs]
    return (shape, other) if shape.layout else (replace(shape, layout=""), replace(other, layout=""))


def received(module: Module) -> Any:
    """The collectives of a module, or why they cannot be listed."""
    try:
        return sorted((one.kind, one.received_bytes, one.group_size, str(one.times)) for one in hlo.collectives(module))
    except ReshardError as error:
        return str(error)[:100]


def outcome(text: str, verdict: bytes | str) -> str:
    """What our reader makes of a text, next to what the judge makes of it: equal, differs, refused, or an error."""
    try:
        mine = hlo.parse(text)
        if isinstance(verdict, str):
            received(mine)
            return f"taken, judge: {verdict}"
        its = hlo.parse(verdict.decode())
        if found := difference(mine, its):
            return f"differs: {found}"
        a, b = received(mine), received(its)
        return "equal" if a == b or mine.devices is not None else f"differs: collectives {a} | {b}"
    except ReshardError as error:
        return f"refused: {error}" if isinstance(verdict, bytes) else f"both refuse ({verdict})"
    except Exception as error:
        return f"foreign error: {error!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="print this many texts that are not read alike")
    options = parser.parse_args()
    texts = texts_of(options.folder)
    if options.mutants:
        choose = random.Random(options.seed)
        texts = [mutated_text(choose, choose.choice(texts)) for _ in range(options.mutants)]
    verdicts = judged(texts)
    started, counts, reasons, shown = time.perf_counter(), Counter[str](), Counter[str](), 0
    for text, verdict in zip(texts, verdicts, strict=True):
        found = outcome(text, verdict)
        kind, _, reason = found.partition(": ")
        counts[kind] += 1
        if kind in ("differs", "refused", "foreign error"):
            reasons[f"{kind}: {re.sub(r'module [^;:]*[;:]', '', reason)[:90]}"] += 1
            if shown < options.show:
                shown += 1
                print(f"---- {found}\n{text}")
    taken = sum(isinstance(verdict, bytes) for verdict in verdicts)
    print(f"{len(texts)} texts, {taken} taken by jaxlib, {verdicts.count('aborted')} end its process")
    print(f"read and compared in {time.perf_counter() - started:.1f} s: {dict(counts.most_common())}")
    for reason, count in reasons.most_common(40):
        print(f"{count:6}  {reason}")


if __name__ == "__main__":
    main()
