"""One module for each format: its metadata read into a `Checkpoint`, and the driver of its coded pieces.

metadata_files  how files of metadata are opened, and names in them resolved: no pipe, no way out of the folder
safetensors     headers and the index
npy             .npy files, and the tiles of `DistArray.save`
dcp             torch.distributed.checkpoint: its archives, and its pickles by inert_pickle
zarr            versions 2 and 3, chunks and shards
orbax           trees of zarr arrays, in a key-value store or in folders
hdf5            datasets of one file
new_arrays      what an array is to be that is made in a store
tensorstore_arrays  the chunks of zarr and orbax, decoded and encoded by tensorstore
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from os import PathLike

from reshard.errors import FileError, quoted, shortened
from reshard.plans.stored import Checkpoint
from reshard.runtime.on_files.formats.dcp import read_dcp
from reshard.runtime.on_files.formats.hdf5 import ENDINGS, read_hdf5
from reshard.runtime.on_files.formats.npy import read_npy
from reshard.runtime.on_files.formats.orbax import read_orbax
from reshard.runtime.on_files.formats.safetensors import INDEX, read_safetensors
from reshard.runtime.on_files.formats.zarr import read_zarr
from reshard.types.units import listed

_FORMATS: tuple[tuple[str, tuple[str, ...], Callable[[str], Checkpoint]], ...] = (
    ("safetensors", (f"*{INDEX}", "*.safetensors"), read_safetensors),
    ("orbax", ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "commit_success.txt"), read_orbax),
    ("zarr", ("zarr.json", ".zarray", ".zgroup"), read_zarr),
    ("dcp", (".metadata", "*.distcp"), read_dcp),
    ("hdf5", tuple(f"*{ending}" for ending in ENDINGS), read_hdf5),
    ("npy", ("layout.json", "*.npy"), read_npy),
)
"""Of each format its name, the names of files that tell it, and what reads it; the first that fits is taken."""


def read_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """What is stored at a path, from metadata alone; raises `FileError` for anything that is not a whole checkpoint."""
    try:
        where = os.path.abspath(os.fsdecode(path))
        names = os.listdir(where) if os.path.isdir(where) else [os.path.basename(where)]
        if not os.path.lexists(where):
            raise FileNotFoundError("there is nothing")
    except (OSError, TypeError, ValueError) as error:
        raise FileError(f"{quoted(path)} cannot be opened ({shortened(str(error))}); give a file or a folder") from None
    # Hidden files of a folder are left by copies and unfinished saves, unless a format itself names them so.
    visible = [name for name in names if name[0] != "."] if os.path.isdir(where) else names
    for _, patterns, read in _FORMATS:
        if any(fnmatch.filter(names if pattern[0] == "." else visible, pattern) for pattern in patterns):
            return read(where)
    known = listed([name for name, _, _ in _FORMATS])
    raise FileError(f"{quoted(where)} is of no format that is known here ({known}); give a checkpoint's file or folder")
