"""Bad files, each of which `open` must refuse: what makes it, by its number in the list, and what the error must name.

1-31 safetensors and its index, 32-35 torch's checkpoints, 40 an array of Python objects. A kind of several forms has a
case for each. Three kinds open, since nothing in the files betrays them: 22, 23 (names are quoted), and 31 without a
save's name in the files.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.files.dcp_maker import (
    Chunk,
    Tensor,
    chunk_zip,
    metadata_of,
    rows_tensor,
    torch_name,
    torch_pickle,
    write_dcp,
)

W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
V = {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]}


class BadFile(NamedTuple):
    """`make` fills a folder and returns what is to be opened; an error must match `says`, and no case runs `touch`."""

    number: int
    make: Callable[[Path], Path]
    says: str


def file_of(header: Any, data: int = 40, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def single(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "model.safetensors"
        path.write_bytes(content)
        return path

    return make


def sparse(folder: Path) -> Path:
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 150_000_000) + b"{")
        file.truncate(200_000_000)
    return path


def with_index(
    weight_map: Any, files: Mapping[str, Any] | None = None, change: Callable[[Path], Any] = lambda folder: None
) -> Callable[[Path], Path]:
    """Two files, with `w` and `v`, and an index that says something of them."""

    def make(folder: Path) -> Path:
        inside = folder / "model"
        inside.mkdir()
        held = {"a.safetensors": {"w": W}, "b.safetensors": {"v": {**V, "data_offsets": [0, 16]}}}
        for name, header in (held if files is None else files).items():
            metadata = header.get("__metadata__", {})
            ends = [said["data_offsets"][1] for tensor, said in header.items() if tensor != "__metadata__"]
            (inside / name).write_bytes(file_of({**header, "__metadata__": metadata}, max(ends)))
        (folder / "outside.safetensors").write_bytes(file_of({"w": W}, 24))
        text = weight_map if isinstance(weight_map, str) else json.dumps({"metadata": {}, "weight_map": weight_map})
        (inside / "model.safetensors.index.json").write_text(text)
        change(inside)
        return inside

    return make


MAP = {"w": "a.safetensors", "v": "b.safetensors"}


def link_out(folder: Path) -> None:
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(folder.parent / "outside.safetensors")


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "a.safetensors").unlink()
        make(folder / "a.safetensors")

    return change


def saved_by(*saves: str) -> Mapping[str, Any]:
    headers = {"a.safetensors": {"w": W}, "b.safetensors": {"v": {**V, "data_offsets": [0, 16]}}}
    return {
        name: {**header, "__metadata__": {"reshard.save": save}}
        for (name, header), save in zip(headers.items(), saves, strict=True)
    }


TWICE = f'{{"w": {json.dumps(W)}, "w": {json.dumps(W)}}}'.encode()
BEYOND = {**W, "data_offsets": [1 << 64, (1 << 64) + 24]}
FOUR_BITS = {**W, "dtype": "F4", "data_offsets": [0, 3]}
SAFETENSORS: Mapping[str, BadFile] = {
    "empty": BadFile(1, single(b""), "byte 0"),
    "seven bytes": BadFile(2, single(b"\1\0\0\0\0\0\0"), "byte 0"),
    "data cut": BadFile(3, single(file_of({"w": W, "v": V}, 10)), "'v', byte"),
    "one byte short": BadFile(4, single(file_of({"w": W, "v": V}, 39)), "'v', byte"),
    "five bytes behind": BadFile(5, single(file_of({"w": W, "v": V}, 45)), "'v', byte"),
    "length 2^63": BadFile(6, single(file_of({"w": W}, 24, 1 << 63)), "byte 0"),
    "header past the end": BadFile(7, single(file_of({"w": W}, 24, 5000)), "byte 0"),
    "header over 100 MB": BadFile(8, sparse, "byte 0"),
    "not JSON": BadFile(9, single(file_of(b"{w: 1}")), "byte 9"),
    "JSON cut": BadFile(10, single(file_of(json.dumps({"w": W}).encode()[:-9])), "byte 6"),
    "a list": BadFile(11, single(file_of([1, 2])), "byte 8"),
    "bad UTF-8": BadFile(12, single(file_of(b'{"\xff\xfe": 1}')), "byte 10"),
    "half of a surrogate pair": BadFile(12, single(file_of(b'{"\\ud800": {}}')), "byte 8"),
    "100,000 levels deep": BadFile(13, single(file_of(b'{"w":' + b"[" * 100_000)), "byte 8"),
    "a number of 5,000 digits": BadFile(13, single(file_of(b'{"w":' + b"9" * 5000 + b"}")), "byte 8"),
    "NaN": BadFile(9, single(file_of(b'{"w": NaN}')), "byte 8"),
    "name twice": BadFile(14, single(file_of(TWICE, 24)), "'w', byte"),
    "overlap": BadFile(15, single(file_of({"w": W, "v": {**V, "data_offsets": [20, 36]}}, 36)), "'v', byte"),
    "alias": BadFile(16, single(file_of({"w": W, "v": W}, 24)), "'v', byte"),
    "gap": BadFile(17, single(file_of({"w": W, "v": {**V, "data_offsets": [32, 48]}}, 48)), "'v', byte"),
    "gap at the start": BadFile(17, single(file_of({"w": {**W, "data_offsets": [8, 32]}}, 32)), "'w', byte"),
    "offsets reversed": BadFile(18, single(file_of({"w": {**W, "data_offsets": [24, 0]}}, 24)), "'w', byte"),
    "offsets negative": BadFile(18, single(file_of({"w": {**W, "data_offsets": [-24, 0]}}, 24)), "'w', byte"),
    "offsets over 2^64": BadFile(18, single(file_of({"w": BEYOND})), "'w', byte"),
    "three offsets": BadFile(18, single(file_of({"w": {**W, "data_offsets": [0, 24, 24]}}, 24)), "'w', byte"),
    "shape is not the length": BadFile(19, single(file_of({"w": {**W, "shape": [2, 4]}}, 24)), "'w', byte"),
    "shape overflows": BadFile(20, single(file_of({"w": {**W, "shape": [1 << 62, 1 << 62]}}, 24)), "'w', byte"),
    "shape overflows around 0": BadFile(
        20, single(file_of({"w": {**W, "shape": [1 << 62, 8, 0], "data_offsets": [0, 0]}}, 0)), "'w', byte"
    ),
    "shape negative": BadFile(20, single(file_of({"w": {**W, "shape": [-2, -3]}}, 24)), "'w', byte"),
    "shape a float": BadFile(20, single(file_of({"w": {**W, "shape": [2.0, 3]}}, 24)), "'w', byte"),
    "offset of -0": BadFile(18, single(file_of(json.dumps({"w": W}).replace("[0,", "[-0,").encode(), 24)), "'w', byte"),
    "shape a bool": BadFile(20, single(file_of({"w": {**W, "shape": [True, 6]}}, 24)), "'w', byte"),
    "unknown dtype": BadFile(21, single(file_of({"w": {**W, "dtype": "F33"}}, 24)), "'w', byte"),
    "dtype a list": BadFile(21, single(file_of({"w": {**W, "dtype": ["F32"]}}, 24)), "'w', byte"),
    "dtype below a byte": BadFile(21, single(file_of({"w": FOUR_BITS}, 3)), "'w', byte"),
    "field missing": BadFile(21, single(file_of({"w": {"dtype": "F32", "shape": [2, 3]}}, 24)), "'w', byte"),
    "a tensor that is no object": BadFile(21, single(file_of({"w": [W]}, 24)), "'w', byte"),
    "metadata of numbers": BadFile(21, single(file_of({"__metadata__": {"a": 1}, "w": W}, 24)), "byte 8"),
}

INDEX: Mapping[str, BadFile] = {
    "a name that climbs": BadFile(24, with_index({"w": "../outside.safetensors"}), "index.json' .*outside its folder"),
    "a name that climbs later": BadFile(24, with_index({"w": "x/../../outside.safetensors"}), "outside its folder"),
    "an absolute name": BadFile(24, with_index({"w": "/etc/passwd"}), "outside its folder"),
    "a link out of the folder": BadFile(24, with_index(MAP, change=link_out), "a link out of the folder"),
    "a name with a NUL": BadFile(24, with_index({"w": "a\0b"}), "name of a file"),
    "file missing": BadFile(25, with_index({**MAP, "u": "c.safetensors"}), "c.safetensors' .*No such file"),
    "in another file": BadFile(26, with_index({"w": "b.safetensors", "v": "a.safetensors"}), "'w': is in this file"),
    "a tensor in no file": BadFile(26, with_index({**MAP, "u": "a.safetensors"}), "'u': is not in this file"),
    "tensors left out": BadFile(27, with_index({"w": "a.safetensors", "u": "b.safetensors"}), "'v': is in this file"),
    "in two files": BadFile(
        28, with_index(MAP, {"a.safetensors": {"w": W}, "b.safetensors": {"w": W}}), "'w': is in .*a.safetensors"
    ),
    "values that are no text": BadFile(29, with_index({"w": 7}), "'w': the file is 7"),
    "values that are lists": BadFile(29, with_index({"w": ["a.safetensors"]}), "'w': the file is"),
    "no map": BadFile(29, with_index(["w"]), "weight_map is"),
    "no weight_map": BadFile(29, with_index("{}"), "weight_map is None"),
    "index not JSON": BadFile(29, with_index("{"), "index.json', byte"),
    "index a list": BadFile(29, with_index("[]"), "index.json', byte"),
    "a folder": BadFile(30, with_index(MAP, change=replace_by(Path.mkdir)), "a.safetensors' is a folder"),
    "a pipe": BadFile(30, with_index(MAP, change=replace_by(os.mkfifo)), "a.safetensors' is a pipe"),
    "a device": BadFile(
        30, with_index(MAP, change=replace_by(lambda path: path.symlink_to("/dev/zero"))), "link out of the folder"
    ),
    "shards of two saves": BadFile(31, with_index(MAP, saved_by("s1", "s2")), "b.safetensors' is of save 's2'"),
}


def metadata(content: bytes) -> Callable[[Path], Path]:
    """A checkpoint of torch whose `.metadata` is this."""

    def make(folder: Path) -> Path:
        write_dcp(folder / "dcp", {"w": rows_tensor()[1]})
        (folder / "dcp" / ".metadata").write_bytes(content)
        return folder / "dcp"

    return make


def torch_files(tensors: Callable[[], Mapping[str, Any]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_dcp(folder / "dcp", tensors())
        return folder / "dcp"

    return make


def call(module: str, name: str, argument: bytes) -> bytes:
    return b"\x80\2c" + f"{module}\n{name}\n".encode() + b"X" + struct.pack("<I", len(argument)) + argument + b"\x85R."


def around(hostile: bytes) -> bytes:
    """A good `.metadata` with a value more in it: a pickle that is taken from it at the end of its first field."""
    good = torch_pickle(metadata_of({"w": rows_tensor()[1]}, {}))
    return good.replace(b"}", b"}" + hostile.removeprefix(b"\x80\2").removesuffix(b".") + b"\x8c\1q" + b"s", 1)


def one_chunk(**change: Any) -> Callable[[], Mapping[str, Any]]:
    def tensors() -> Mapping[str, Any]:
        _, rows = rows_tensor(1)
        return {"w": rows._replace(chunks=[rows.chunks[0]._replace(**change)])}

    return tensors


def of_zip(change: Callable[[dict[str, bytes]], Any] | None = None, **options: Any) -> Callable[[], Mapping[str, Any]]:
    """One tensor whose archive is changed."""
    more = {} if change is None else {"change": change}
    array = np.arange(24, dtype="float32").reshape(8, 3)
    return lambda: one_chunk(content=chunk_zip(array, options.pop("dtype", "float32"), **more, **options))()


def rows_at(*spans: tuple[int, int]) -> Callable[[], Mapping[str, Any]]:
    """A tensor of 8 rows with chunks of these rows."""
    whole = np.arange(24 * 3, dtype="float32").reshape(24, 3)
    chunks = [Chunk((a, 0), (b - a, 3), "f", chunk_zip(whole[a:b], "float32")) for a, b in spans]
    return lambda: {"w": Tensor("float32", (8, 3), chunks)}


def flip(content: bytes, what: bytes, at: int = 0, to: bytes | None = None) -> bytes:
    """A byte of the archive changed, so far behind the last place of `what`."""
    place = content.rindex(what) + at
    changed = bytes((content[place] ^ 0x55,)) if to is None else to
    return content[:place] + changed + content[place + len(changed) :]


def flipped(what: bytes, at: int = 0, to: bytes | None = None) -> Callable[[], Mapping[str, Any]]:
    return lambda: one_chunk(content=flip(rows_tensor(1)[1].chunks[0].content, what, at, to))()


TOUCH = b"touch /tmp/reshard-was-here"
SHARED = b"".join(b"](%se" % (b"h%c" % n * 10) + b"q%c" % (n + 1) for n in range(12))
HUGE = Tensor("float32", (1 << 60, 9), [])
DCP: Mapping[str, BadFile] = {
    "calls os.system": BadFile(32, metadata(call("os", "system", TOUCH)), "metadata', byte .*os.system"),
    "calls posix.system": BadFile(32, metadata(call("posix", "system", TOUCH)), "posix.system"),
    "calls eval": BadFile(32, metadata(call("builtins", "eval", b"1")), "builtins.eval"),
    "calls getattr": BadFile(32, metadata(call("builtins", "getattr", b"x")), "builtins.getattr"),
    "calls torch.load": BadFile(32, metadata(call("torch", "load", b"x")), "torch.load"),
    "calls os.system inside": BadFile(32, metadata(around(call("os", "system", TOUCH))), "os.system"),
    "names by the stack": BadFile(32, metadata(b"\x80\4\x8c\2os\x8c\6system\x93."), "os.system"),
    "names by the registry": BadFile(32, metadata(b"\x80\2\x82\1."), "opcode EXT1"),
    "an instance of a class": BadFile(32, metadata(b"(S'x'\nios\nsystem\n."), "opcode"),
    "cut": BadFile(33, metadata(torch_pickle(metadata_of({"w": rows_tensor()[1]}, {}))[:-200]), "metadata', byte"),
    "empty": BadFile(33, metadata(b""), "metadata', byte 0"),
    "asks for 2^60 bytes": BadFile(33, metadata(b"\x80\4\x8e" + struct.pack("<Q", 1 << 60) + b"."), "byte 2"),
    "asks for 2^60 of text": BadFile(33, metadata(b"\x80\4\x8d" + struct.pack("<Q", 1 << 60) + b"."), "byte 2"),
    "memo 2^31": BadFile(33, metadata(b"\x80\2Nr" + struct.pack("<I", (1 << 31) - 1) + b"."), "Metadata is missing"),
    "10^6 tuples deep": BadFile(33, metadata(b"\x80\4)" + b"\x85" * 1_000_000 + b"."), "nested too deep"),
    "10^6 lists deep": BadFile(33, metadata(b"\x80\4" + b"]" * 1_000_000 + b"a" * 999_999 + b"."), "too many values"),
    "10^12 shared lists": BadFile(33, metadata(b"\x80\4]q\0" + SHARED + b"."), "metadata', byte"),
    "state for a function": BadFile(33, metadata(b"\x80\2ctorch\nSize\n}b."), "a state to a Named"),
    "a key of tuples": BadFile(33, metadata(b"\x80\2}(K\1\x85Nu."), "a key is a tuple"),
    "a list": BadFile(33, metadata(b"\x80\4]."), "Metadata is missing"),
    "another class": BadFile(33, metadata(torch_pickle(torch_name("torch", "Size"))), "Metadata is missing"),
    "chunks overlap": BadFile(34, torch_files(rows_at((0, 5), (4, 8))), "'w'.*overlap"),
    "chunks leave a gap": BadFile(34, torch_files(rows_at((0, 3), (4, 8))), "'w'.*missing"),
    "chunks exceed the shape": BadFile(34, torch_files(rows_at((0, 4), (4, 9))), "'w'.*outside the shape"),
    "no chunks": BadFile(34, torch_files(lambda: {"w": Tensor("float32", (8, 3), [])}), "'w'.*missing"),
    "shape beyond an index": BadFile(34, torch_files(lambda: {"w": HUGE}), "'w'.*elements"),
    "dtype of no layout": BadFile(34, torch_files(lambda: {"w": Tensor("complex32", (8, 3), [])}), "'w'.*complex32"),
    "a chunk in no file": BadFile(
        34, metadata(torch_pickle(metadata_of({"w": rows_tensor()[1]}, {}))), "'w'.*no list of at most 0"
    ),
    "entry compressed": BadFile(35, torch_files(of_zip(level=zipfile.ZIP_DEFLATED)), "'w', byte .*compressed"),
    "span past the file": BadFile(35, torch_files(one_chunk(length=1 << 20)), "'w', byte .*but the file has"),
    "span of another place": BadFile(35, torch_files(one_chunk(start=3, length=60)), "'w', byte .*no end of a zip"),
    "span of 2^62": BadFile(35, torch_files(one_chunk(start=1 << 62)), "'w', byte .*but the file has"),
    "path escapes": BadFile(35, torch_files(one_chunk(file="../x.distcp")), "metadata' names .*outside its folder"),
    "absolute path": BadFile(35, torch_files(one_chunk(file="/etc/passwd")), "metadata' names .*outside its folder"),
    "no storage": BadFile(35, torch_files(of_zip(lambda entries: entries.pop("data/0"))), "'w', byte .*no storage"),
    "storage too short": BadFile(
        35, torch_files(of_zip(lambda entries: entries.update({"data/0": bytes(40)}))), "'w', byte .*storage of 40 B"
    ),
    "big-endian": BadFile(35, torch_files(of_zip(lambda entries: entries.update(byteorder=b"big"))), "'w'.*big-endian"),
    "another dtype": BadFile(35, torch_files(of_zip(dtype="int64")), "'w', .*int64', but the metadata say float32"),
    "strides beyond the storage": BadFile(35, torch_files(of_zip(strides=(400, 1))), "'w', byte .*are used of"),
    "begins beyond the storage": BadFile(35, torch_files(of_zip(first=9)), "'w', byte .*are used of"),
    "data.pkl calls": BadFile(
        35, torch_files(of_zip(lambda entries: entries.update({"data.pkl": call("os", "system", TOUCH)}))), "os.system"
    ),
    "directory elsewhere": BadFile(35, torch_files(flipped(b"PK\5\6", 16)), "'w', byte"),
    "directory of 4 GiB": BadFile(35, torch_files(flipped(b"PK\5\6", 12, b"\xff\xff\xff\xff")), "'w', byte"),
    "entries more than there": BadFile(35, torch_files(flipped(b"PK\5\6", 10, b"\xff\xff")), "'w', byte .*damaged"),
    "a local header elsewhere": BadFile(35, torch_files(flipped(b"archive/data/0", -4)), "'w', byte .*not where"),
}


def _pickled_array(folder: Path) -> Path:
    np.save(folder / "w.npy", np.array([{}, torch_name]), allow_pickle=True)
    return folder / "w.npy"


NPY = {"an array of objects": BadFile(40, _pickled_array, "'w', byte 10: .*Python objects")}

BAD_FILES: Mapping[str, BadFile] = {
    f"{kind}: {name}": bad
    for kind, cases in (("safetensors", SAFETENSORS), ("index", INDEX), ("dcp", DCP), ("npy", NPY))
    for name, bad in cases.items()
}
