"""Safetensors: one file, a folder of files, or one with an index that says which tensor is in which file.

    8 bytes      n, the length of the header, little-endian
    n bytes      {"w": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}, "__metadata__": {text: text}}
    the rest     elements in C order; tensors follow each other without gaps to the end of the file

The judgement is that of the safetensors library, which tells no offsets and so cannot be what reads here; the tests
compare both. Stricter are: names that stand twice, a header that does not begin with a brace (as the format's text
demands), elements of less than a byte, and numbers beyond 2^63. Of an index the library knows nothing: here every file
that it names holds exactly the tensors that it says.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from reshard.errors import FileError, quoted, shortened
from reshard.plans.stored import Checkpoint, Stored, StoredFile, StoredPiece
from reshard.runtime.on_files.formats.metadata_files import (
    OpenedFile,
    file_error,
    open_regular,
    read_metadata,
    read_side_by_side,
    read_sizes,
    resolve_inside,
)
from reshard.types import dtypes
from reshard.types.whole import MOST

INDEX = ".safetensors.index.json"
SAVE_ID = "reshard.save"
"""The field of `__metadata__` that is equal in all files of one save."""

_MOST_HEADER = 100_000_000  # As the library has it.
DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_SUB_BYTE = frozenset(("F4", "F6_E2M3", "F6_E3M2"))


def read_safetensors(path: str) -> Checkpoint:
    """What the header of each file says, checked; raises `FileError` for files that are not what they say."""
    if not os.path.isdir(path) and not path.endswith(INDEX):
        tensors, identity, _ = _read_file(path, 0)
        return Checkpoint(path, "safetensors", (identity,), {stored.name: stored for stored in tensors})
    folder, names = (path, os.listdir(path)) if os.path.isdir(path) else os.path.split(path)
    indexes = [names] if isinstance(names, str) else sorted(name for name in names if name.endswith(INDEX))
    if len(indexes) > 1:
        raise file_error(path, f"has the indexes {quoted(indexes)}; open one of them instead of the folder")
    index = os.path.join(folder, indexes[0]) if indexes else None
    home_of: dict[str, str] | None = None
    identities: list[StoredFile] = []
    if index is not None:
        home_of, index_identity = _read_weight_map(index)
        shards = sorted(set(home_of.values()))
        identities.append(index_identity)
    else:
        # Hidden ones are what copies and unfinished saves leave.
        shards = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("."))
    said_by = index or path
    found: dict[str, Stored] = {}
    files: list[StoredFile] = []
    saves: dict[str | None, str] = {}  # Files of other writers have no such field, and are all of save None.

    def read_shard(number: int) -> tuple[list[Stored], StoredFile, str | None]:
        return _read_file(resolve_inside(folder, shards[number], said_by), number)

    for shard, (tensors, identity, save) in zip(shards, read_side_by_side(read_shard, range(len(shards))), strict=True):
        file = identity.path
        files.append(identity)
        saves.setdefault(save, file)
        for stored in tensors:
            if stored.name in found:
                other = files[found[stored.name].pieces[0].file].path
                raise file_error(
                    file, f"is in {quoted(other)} as well; open one of these files, or an index", tensor=stored.name
                )
            if home_of is not None and home_of.get(stored.name) != shard:
                said = quoted(home_of[stored.name]) if stored.name in home_of else "no file"
                raise file_error(
                    file, f"is in this file, and the index has it in {said}; write the index anew", tensor=stored.name
                )
            found[stored.name] = stored
    if len(saves) > 1:
        (one, first), (other, second) = list(saves.items())[:2]
        raise file_error(
            second, f"is of save {quoted(other)}, but {quoted(first)} is of save {quoted(one)}; take all from one save"
        )
    missing = [name for name in home_of or () if name not in found]
    if missing:
        home = os.path.join(folder, (home_of or {})[missing[0]])
        raise file_error(home, "is not in this file, where the index has it; restore the file", tensor=missing[0])
    return Checkpoint(path, "safetensors", (*files, *identities), found)


def _read_weight_map(path: str) -> tuple[dict[str, str], StoredFile]:
    content, identity = read_metadata(path)
    said = _parse_object(path, content, 0).get("weight_map")
    if not isinstance(said, dict):
        raise file_error(path, f"weight_map is {quoted(said)}; write an object of tensors and their files")
    home_of = cast("dict[str, Any]", said)
    for name, home in home_of.items():
        if not isinstance(home, str):
            raise file_error(path, f"the file is {quoted(home)}; write its name in text", tensor=name)
    return home_of, identity


def _read_file(path: str, number: int) -> tuple[list[Stored], StoredFile, str | None]:
    """The tensors of one file, in the order of their bytes, its identity, and the save that it says it is of."""
    with open_regular(path) as file:
        header, start = _read_tensor_header(file)
        metadata = header.pop("__metadata__", None)
        texts = cast("dict[str, Any]", metadata if isinstance(metadata, dict) else {})
        if metadata is not None and (
            texts is not metadata or not all(isinstance(text, str) for text in texts.values())
        ):
            raise file_error(path, "__metadata__ is not an object of texts; write it anew", offset=8)
        spans = [(*_read_tensor(path, name, said), name) for name, said in header.items()]
        # In the order of bytes each tensor begins where the last one ends: so gaps, overlaps and aliases are found.
        spans.sort(key=lambda span: span[:2])
        tensors: list[Stored] = []
        end = 0
        for begin, stop, dtype, shape, name in spans:
            if begin != end:
                how = "overlaps what lies before" if begin < end else "leaves a gap"
                raise file_error(
                    path,
                    f"it begins at byte {begin} of the data and {how}, which ends at {end}; write the file anew",
                    tensor=name,
                    offset=start + begin,
                )
            box = tuple((0, size) for size in shape)
            piece = StoredPiece(box, number, start + begin, stop - begin)
            tensors.append(Stored(name, dtype, shape, (piece,)))
            end = stop
        if start + end != file.size:
            last = tensors[-1].name if tensors else None
            raise file_error(
                path,
                f"the data end here, but the file has {file.size} B; copy it again",
                tensor=last,
                offset=start + end,
            )
        return tensors, file.identity, texts.get(SAVE_ID)


def _read_tensor_header(file: OpenedFile) -> tuple[dict[str, Any], int]:
    """The JSON in front of the data, and where the data begin."""
    if file.size < 8:
        raise file_error(
            file.path, f"has {file.size} B, and the header's length alone takes 8; copy it again", offset=0
        )
    length = int.from_bytes(file.read(0, 8), "little")
    if length > _MOST_HEADER:
        raise file_error(
            file.path, f"the header has {length} B, more than {_MOST_HEADER}; is it safetensors?", offset=0
        )
    if 8 + length > file.size:
        raise file_error(
            file.path, f"the header has {length} B, but the file ends at byte {file.size}; copy it again", offset=0
        )
    content = file.read(8, length)
    if content[:1] != b"{":
        raise file_error(file.path, f"the header begins with {quoted(content[:1])}, not with '{{'", offset=8)
    return _parse_object(file.path, content, 8), 8 + length


def _read_tensor(path: str, name: str, said: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """Where one tensor's bytes begin and end in the data, its dtype and shape."""

    def refuse(found: str) -> FileError:
        return file_error(path, f"{found}; write the file anew", tensor=name, offset=8)

    if type(said) is not dict:
        raise refuse(f"the header says {quoted(said)} of it, not an object")
    fields = cast("dict[str, Any]", said)
    dtype, shape, span = fields.get("dtype"), read_sizes(fields.get("shape")), read_sizes(fields.get("data_offsets"), 2)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        if isinstance(dtype, str) and dtype in _SUB_BYTE:
            raise refuse(f"its dtype {dtype} has elements of less than a byte, which layouts do not know")
        raise refuse(f"its dtype is {quoted(dtype)}, not one of {', '.join(DTYPES)}")
    if shape is None:
        raise refuse(f"its shape is {quoted(fields.get('shape'))}, not a list of whole numbers from 0 to 2^63")
    if span is None:
        raise refuse(f"its data_offsets are {quoted(fields.get('data_offsets'))}, not two whole numbers from 0 to 2^63")
    # A shape like (2^40, 2^40, 0) has no elements, and no library can index it.
    if math.prod(size for size in shape if size) > MOST:
        raise refuse(f"its shape {quoted(shape)} has more elements than any array")
    (begin, stop), needed = span, dtypes.nbytes(math.prod(shape), DTYPES[dtype])
    if stop - begin != needed:
        raise refuse(
            f"its data_offsets {quoted(span)} hold {stop - begin} B; {dtype} of shape {quoted(shape)} takes {needed}"
        )
    return begin, stop, DTYPES[dtype], shape


def _parse_object(path: str, content: bytes, offset: int) -> dict[str, Any]:
    """The JSON object that a file holds from a byte on, in which no name stands twice."""

    def read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise file_error(path, "stands twice in the header; write the file anew", tensor=twice, offset=offset)
        return made

    try:
        text = content.decode()
        # JSON has no NaN and no Infinity: `int` raises a ValueError for their names.
        # The library takes -0 for a fraction, as which no number of a header passes.
        whole_number: Callable[[str], Any] | None = None
        if "-0" in text:
            whole_number = lambda digits: -0.0 if digits == "-0" else int(digits)  # noqa: E731
        made = json.loads(text, object_pairs_hook=read_pairs, parse_constant=int, parse_int=whole_number)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(made, ensure_ascii=False).encode()  # Half of a surrogate pair is no text.
    except FileError:
        raise
    except (ValueError, RecursionError) as error:  # Not UTF-8, not JSON, numbers of 5,000 digits; nested too deep.
        at = offset + error.start if isinstance(error, UnicodeDecodeError) else offset
        if isinstance(error, json.JSONDecodeError):
            at = offset + len(error.doc[: error.pos].encode())
        why = shortened(f"{type(error).__name__}: {error}")
        raise file_error(path, f"this is not JSON ({why}); copy the file again", offset=at) from None
    if type(made) is not dict:
        raise file_error(path, f"this is {quoted(made)}, not an object; copy the file again", offset=offset)
    return cast("dict[str, Any]", made)
