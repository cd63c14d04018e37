"""Checkpoints as torch.distributed.checkpoint writes them, made without torch: the same names, pickles and archives.

Pickles are made by Python's own pickler, whose classes only have the names of torch's; archives by `zipfile`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

METADATA = "torch.distributed.checkpoint.metadata"
STORAGES = {"float32": "FloatStorage", "int64": "LongStorage", "bfloat16": "BFloat16Storage", "bool": "BoolStorage"}


def torch_name(module: str, name: str) -> type[Any]:
    """A class that is pickled as the name of something in torch."""
    return type(name, (), {"__module__": module, "__qualname__": name, "__init__": lambda self, *_: None})


class Called:
    """An object that is pickled as a call."""

    def __init__(self, what: type[Any], *args: Any) -> None:
        self.call = what, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class TorchPickler(pickle._Pickler):  # type: ignore[name-defined]
    """A pickler that writes names without asking whether they can be imported."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        self.write(f"c{obj.__module__}\n{obj.__qualname__}\n".encode())
        self.memoize(obj)

    def save_type(self, obj: Any) -> None:
        self.save_global(obj)

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, type: save_type}  # type: ignore[attr-defined]

    def persistent_id(self, obj: Any) -> Any:
        return obj.of if isinstance(obj, Persistent) else None


class Persistent(NamedTuple):
    of: Any


def torch_pickle(value: Any, protocol: int = 4) -> bytes:
    out = io.BytesIO()
    TorchPickler(out, protocol).dump(value)
    return out.getvalue()


def made(module: str, name: str, state: Any) -> Any:
    """An object of a class of torch with this state."""
    kind = torch_name(module, name)
    kind.__getstate__ = lambda self: state  # type: ignore[attr-defined]
    return kind()


def size_of(*sizes: int) -> Called:
    return Called(torch_name("torch", "Size"), tuple(sizes))


def chunk_zip(
    array: np.ndarray, dtype: str, *, first: int = 0, storage: np.ndarray | None = None,
    strides: Sequence[int] | None = None, change: Callable[[dict[str, bytes]], Any] = lambda entries: None,
    untyped: bool = False, level: int = zipfile.ZIP_STORED,
) -> bytes:  # fmt: skip
    """A tensor as torch.save writes it: a view from element `first` on of its storage."""
    held = np.ascontiguousarray(array if storage is None else storage)
    plain = np.empty(array.shape, array.dtype).strides
    steps = [each // array.itemsize for each in plain] if strides is None else strides
    kind = torch_name("torch.storage", "UntypedStorage") if untyped else torch_name("torch", STORAGES[dtype])
    where = Persistent(("storage", kind, "0", "cpu", held.nbytes if untyped else held.size))
    hooks = Called(torch_name("collections", "OrderedDict"))
    version, more = ("v3", (torch_name("torch", dtype),)) if untyped else ("v2", ())
    rebuild = torch_name("torch._utils", f"_rebuild_tensor_{version}")
    tensor = Called(rebuild, where, first, tuple(array.shape), tuple(steps), False, hooks, *more)
    entries = {"data.pkl": torch_pickle(tensor, 2), "byteorder": b"little"}
    entries |= {"data/0": held.tobytes(), "version": b"3\n"}
    change(entries)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", level) as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


class Chunk(NamedTuple):
    """A chunk: where it begins and its extents in the tensor, the file that has it, and its archive."""

    at: tuple[int, ...]
    extents: tuple[int, ...]
    file: str
    content: bytes
    length: int | None = None
    start: int | None = None


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]


def metadata_of(
    tensors: Mapping[str, Any], spans: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]], named: bool = False
) -> Any:
    """The object in `.metadata`; a tensor that is no `Tensor` is an object of bytes. With `named`, properties
    are a dict and not a tuple.
    """
    layout = Called(torch_name("torch.serialization", "_get_layout"), "torch.strided")
    encoding = Called(torch_name(METADATA, "_MEM_FORMAT_ENCODING"), 0)
    said: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            said[name] = made(METADATA, "BytesStorageMetadata", {})
            continue
        properties: Any = torch_name("torch", tensor.dtype), layout, False, encoding, False
        if named:
            fields = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
            properties = dict(zip(fields, properties, strict=True))
        chunks = [
            made(METADATA, "ChunkStorageMetadata", {"offsets": size_of(*chunk.at), "sizes": size_of(*chunk.extents)})
            for chunk in tensor.chunks
        ]
        state = {"properties": made(METADATA, "TensorProperties", properties), "size": size_of(*tensor.shape)}
        said[name] = made(METADATA, "TensorStorageMetadata", {**state, "chunks": chunks})
    storage = {
        made(METADATA, "MetadataIndex", {"fqn": name, "offset": size_of(*at), "index": 0}): made(
            "torch.distributed.checkpoint.filesystem", "_StorageInfo",
            {"relative_path": file, "offset": start, "length": length},
        )
        for (name, at), (file, start, length) in spans.items()
    }  # fmt: skip
    state = {"state_dict_metadata": said, "planner_data": {}, "storage_data": storage, "storage_meta": None}
    return made(METADATA, "Metadata", state)


def write_dcp(folder: Path, tensors: Mapping[str, Any], named: bool = False) -> None:
    """A checkpoint with these tensors, the chunks of each file one behind the other."""
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes] = {}
    spans: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks if isinstance(tensor, Tensor) else ():
            before = contents.get(chunk.file, b"")
            start = len(before) if chunk.start is None else chunk.start
            length = len(chunk.content) if chunk.length is None else chunk.length
            spans[name, chunk.at] = chunk.file, start, length
            contents[chunk.file] = before + chunk.content
    for file, content in contents.items():
        if ".." not in file:
            (folder / file).write_bytes(content)
    (folder / ".metadata").write_bytes(torch_pickle(metadata_of(tensors, spans, named)))


def rows_tensor(count: int = 2) -> tuple[np.ndarray, Tensor]:
    """A tensor in chunks of rows, each in a file of its own."""
    whole = np.arange(24, dtype="float32").reshape(8, 3)
    step = 8 // count
    chunks = [
        Chunk((at, 0), (step, 3), f"__{at // step}_0.distcp", chunk_zip(whole[at : at + step], "float32"))
        for at in range(0, 8, step)
    ]
    return whole, Tensor("float32", (8, 3), chunks)
