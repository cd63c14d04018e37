"""`reshard.files.open`: what is stored at a path, from its metadata alone."""

from __future__ import annotations

from os import PathLike

from reshard.plans.stored import Checkpoint
from reshard.runtime.on_files.formats import read_checkpoint


def open(path: str | PathLike[str]) -> Checkpoint:
    """What is stored at a path: the names, dtypes, shapes and pieces of its tensors. No element is read.

    A path is a file or folder of a format that the docs list ([files.md](files.md)), and may be one of many files, or
    an index. Raises `FileError` for anything else, and for files that are not what they say; it names the file, the
    tensor and the byte.
    """
    return read_checkpoint(path)
