"""The stack frames of a module: the lines of the user's program that an instruction comes from.

    metadata = "{" {key "=" value} "}"        keys op_name, stack_frame_id; before jax 0.10 source_file, source_line
    tables   = "FileNames" {id string} "FunctionNames" {id string}
               "FileLocations" {id "{file_name_id=" id "function_name_id=" id "line=" n ... "}"}
               "StackFrames" {id "{file_location_id=" id "parent_frame_id=" id "}"}

A frame of `StackFrames` is one line of a stack, and its parent is the line that called it. XLA prints the ids of
parents one too high, so the outermost frame seems to be its own parent (jax 0.10.2 and 0.12.0.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_FIELD = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(-?\d+))')
_ROW = re.compile(r'^(\d+) (?:"((?:[^"\\]|\\.)*)"|\{(.*)\})\s*$')
_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_OURS = str(Path(__file__).resolve().parent.parent)
_FRAMEWORKS = "jax|jaxlib|reshard|flax|haiku|equinox|optax|chex|jaxtyping|beartype|einops"
_LIBRARY = re.compile(rf"[/\\](?:site|dist)-packages[/\\](?:{_FRAMEWORKS})[/\\]")


@dataclass(frozen=True)
class Frame:
    """A line of a program.

    >>> Frame("train.py", 12).users, Frame("/env/site-packages/jax/_src/numpy.py", 1).users
    (True, False)
    """

    file: str
    line: int
    function: str = ""

    @property
    def users(self) -> bool:
        """Whether the line is of the program itself, rather than of jax, a framework on top of it or this package."""
        return not (_LIBRARY.search(self.file) or self.file.startswith(_OURS))


@dataclass(frozen=True)
class Source:
    """The origin of an instruction: JAX's name stack and the user's innermost line, as far as they are known.

    Instructions that the partitioner inserts have no line, or only the name of an argument. They get the line of the
    nearest instruction that has one, and `exact` is False. `frames` is the whole stack, innermost first, frameworks'
    lines included.

    >>> print(Source("jit(f)/mul", "train.py", 12), "|", Source("jit(f)/mul", "train.py", 12, exact=False))
    train.py:12 (jit(f)/mul) | near train.py:12 (jit(f)/mul)
    """

    op_name: str
    file: str | None = None
    line: int | None = None
    function: str | None = None
    exact: bool = True
    frames: tuple[Frame, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else ""
        about = "" if self.exact or not where else "near "
        return about + (f"{where} ({self.op_name})" if where and self.op_name else where or self.op_name or "unknown")


FramesById = Mapping[int, tuple[Frame, int]]
"""The frames of a module by their ids, each with the id of its parent, 0 for none."""


class Tables:
    """The stack frames of a module, which `read` lists on first use."""

    def __init__(self, read: Callable[[], FramesById]) -> None:
        self._read = read

    @cached_property
    def _frames(self) -> FramesById:
        return self._read()

    def stack(self, metadata: str) -> tuple[Frame, ...]:
        """The frames of an instruction with this metadata, innermost first; empty if the metadata names no line."""
        fields = metadata_fields(metadata)
        if "source_file" in fields:
            return (Frame(fields["source_file"], int(fields.get("source_line", "0"))),)
        frames: list[Frame] = []
        at = int(fields.get("stack_frame_id", "0"))
        while at in self._frames:
            frame, parent = self._frames[at]
            frames.append(frame)
            if parent >= at:  # a parent has a lower id than its frame, so the loop ends
                break
            at = parent
        return tuple(frames)

    def source(self, metadata: str) -> Source | None:
        """The origin that the metadata states: maybe without a line; None if there is neither line nor name."""
        op_name = metadata_fields(metadata).get("op_name", "")
        stack = self.stack(metadata)
        frame = next((frame for frame in stack if frame.users), stack[0] if stack else None)
        if frame is None:
            return Source(op_name) if op_name else None
        return Source(op_name, frame.file, frame.line, frame.function or None, frames=stack)


def read_tables(text: str) -> FramesById:
    """Reads the tables of a module's text."""
    sections: dict[str, dict[int, Mapping[str, str]]] = {name: {} for name in _SECTIONS}
    section: str | None = None
    for line in text.splitlines():
        row = _ROW.match(line)
        if row is None:
            section = line.strip() if line.strip() in sections else section
        elif section is not None:  # A row that is a single string has it under the empty key.
            sections[section][int(row[1])] = metadata_fields(row[3]) if row[2] is None else {"": row[2]}
    files, functions, locations, frames = (sections[name] for name in _SECTIONS)
    # XLA prints the ids of parents one too high, so the outermost frame seems to be its own parent.
    offset = int("parent_frame_id" in frames.get(1, {}) and frames[1]["parent_frame_id"] == "1")
    by_id: dict[int, tuple[Frame, int]] = {}
    for at, row in frames.items():
        location = locations.get(int(row.get("file_location_id", "0")), {})
        file = files.get(int(location.get("file_name_id", "0")), {}).get("", "")
        function = functions.get(int(location.get("function_name_id", "0")), {}).get("", "")
        if file:
            parent = int(row.get("parent_frame_id", "0")) - offset
            by_id[at] = (Frame(file, int(location.get("line", "0")), function), parent)
    return by_id


def metadata_fields(text: str) -> dict[str, str]:
    """The keys and values of an instruction's `metadata`.

    >>> metadata_fields('{op_name="jit(f)/mul" stack_frame_id=2}')
    {'op_name': 'jit(f)/mul', 'stack_frame_id': '2'}
    """
    return {key: number or string for key, string, number in _FIELD.findall(text)}
