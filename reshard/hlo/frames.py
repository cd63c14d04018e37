"""Where in the user's program an instruction comes from.

    metadata = "{" {key "=" value} "}"        keys op_name, stack_frame_id; before jax 0.10 source_file, source_line
    tables   = "FileNames" {id string} "FunctionNames" {id string}
               "FileLocations" {id "{file_name_id=" id "function_name_id=" id "line=" n ... "}"}
               "StackFrames" {id "{file_location_id=" id "parent_frame_id=" id "}"}

A frame of `StackFrames` is one line of the stack, and its parent is the line that called it. XLA prints the ids of
parents raised by one: the first frame, which no one called, names itself (jax 0.10.2 and 0.12.0.1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_FIELD = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(-?\d+))')
_ROW = re.compile(r'^(\d+) (?:"((?:[^"\\]|\\.)*)"|\{(.*)\})\s*$')
_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_OURS = str(Path(__file__).resolve().parent.parent)
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:jax|jaxlib|reshard)[/\\]")


@dataclass(frozen=True)
class Frame:
    """A line of a program."""

    file: str
    line: int
    function: str = ""

    @property
    def users(self) -> bool:
        """Whether it is the user's, not one of jax, jaxlib or this package."""
        return not (_LIBRARY.search(self.file) or self.file.startswith(_OURS))


@dataclass(frozen=True)
class Source:
    """The origin of an instruction: JAX's name stack and the user's innermost line, each where known.

    The partitioner gives what it inserts no line of its own, or only the name of an argument. Then the line is that
    of the nearest instruction that has one, and `exact` is False.
    """

    op_name: str
    file: str | None = None
    line: int | None = None
    function: str | None = None
    exact: bool = True

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else ""
        about = "" if self.exact or not where else "near "
        return about + (f"{where} ({self.op_name})" if where and self.op_name else where or self.op_name or "unknown")


@dataclass(frozen=True)
class Tables:
    """The tables of a module's header, read when they are first asked for."""

    text: str

    def stack(self, metadata: str) -> tuple[Frame, ...]:
        """The frames of an instruction with that metadata, innermost first; none if it names no line."""
        fields = metadata_fields(metadata)
        if "source_file" in fields:
            return (Frame(fields["source_file"], int(fields.get("source_line", "0"))),)
        found: list[Frame] = []
        at = int(fields.get("stack_frame_id", "0"))
        while at in self._frames:
            frame, parent = self._frames[at]
            found.append(frame)
            if parent >= at:  # parents come before their frames: ids fall, and the loop ends
                break
            at = parent
        return tuple(found)

    def source(self, metadata: str) -> Source | None:
        """The origin that the metadata states; without a line if it states none, None if it states nothing."""
        op_name = metadata_fields(metadata).get("op_name", "")
        stack = self.stack(metadata)
        frame = next((frame for frame in stack if frame.users), stack[0] if stack else None)
        if frame is None:
            return Source(op_name) if op_name else None
        return Source(op_name, frame.file, frame.line, frame.function or None)

    @cached_property
    def _frames(self) -> Mapping[int, tuple[Frame, int]]:
        """By id, each frame and the id of its parent, 0 for none."""
        files, functions, locations, frames = (self._sections[name] for name in _SECTIONS)
        raised = int("parent_frame_id" in frames.get(1, {}) and frames[1]["parent_frame_id"] == "1")
        found: dict[int, tuple[Frame, int]] = {}
        for at, row in frames.items():
            place = locations.get(int(row.get("file_location_id", "0")), {})
            file = files.get(int(place.get("file_name_id", "0")), {}).get("", "")
            function = functions.get(int(place.get("function_name_id", "0")), {}).get("", "")
            if file:
                parent = int(row.get("parent_frame_id", "0")) - raised
                found[at] = (Frame(file, int(place.get("line", "0")), function), parent)
        return found

    @cached_property
    def _sections(self) -> Mapping[str, Mapping[int, Mapping[str, str]]]:
        """By section and id, the fields of each row; a row that is one string has it under the empty key."""
        found: dict[str, dict[int, Mapping[str, str]]] = {name: {} for name in _SECTIONS}
        section: str | None = None
        for line in self.text.splitlines():
            row = _ROW.match(line)
            if row is None:
                section = line.strip() if line.strip() in found else section
            elif section is not None:
                found[section][int(row[1])] = metadata_fields(row[3]) if row[2] is None else {"": row[2]}
        return found


def metadata_fields(text: str) -> dict[str, str]:
    """The keys and values of `{op_name="jit(f)/mul" stack_frame_id=2}`.

    >>> metadata_fields('{op_name="jit(f)/mul" stack_frame_id=2}')
    {'op_name': 'jit(f)/mul', 'stack_frame_id': '2'}
    """
    return {key: number or string for key, string, number in _FIELD.findall(text)}
