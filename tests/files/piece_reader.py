"""The tests' reader of pieces: numpy and what `Stored` says, none of the package's engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reshard.plans.stored import Checkpoint


def read_pieces(ckpt: Checkpoint, name: str, dtype: np.dtype) -> np.ndarray:
    """A tensor read as its pieces say, by numpy alone."""
    stored = ckpt[name]
    out = np.zeros(stored.shape, dtype)
    for piece in stored.pieces:
        shape = [stop - start for start, stop in piece.box]
        content = Path(ckpt.files[piece.file].path).read_bytes()[piece.offset : piece.offset + piece.nbytes]
        raw = np.frombuffer(content, dtype)
        strides = None if piece.strides is None else [each * dtype.itemsize for each in piece.strides]
        here = np.lib.stride_tricks.as_strided(raw, shape, strides) if strides else raw.reshape(shape)
        out[tuple(slice(*each) for each in piece.box)] = here
    return out
