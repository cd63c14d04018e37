"""What `launch` starts on each rank: a script as by `python -m mpi4py`, but an error that ranks share is shown once.

    python -m reshard.mpi.rank script.py --its options

The ranks of one machine meet in the folder that `launch` makes for a run. The first with an error shows its traceback;
those with the same error wait until it stands there, since the first rank that ends by an error ends all of them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from reshard.mpi.launch import FOLDER

_PATIENCE = 5.0  # Seconds for which a rank waits for another one's traceback.


def show_error(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Shows an exception that ends this rank, unless another rank has shown the same one.

    Without the folder of `launch`, every rank shows its own.
    """
    folder, key = os.environ.get(FOLDER), hashlib.sha256(f"{kind.__name__}: {error}".encode()).hexdigest()
    if folder is None or not Path(folder).is_dir():
        _print_error(kind, error, frames)
        return
    done = Path(folder, f"{key}.shown")
    try:
        Path(folder, key).touch(exist_ok=False)
    except OSError:
        until = time.monotonic() + _PATIENCE
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return
    _print_error(kind, error, frames)
    done.touch()


def _print_error(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Writes the traceback at once, without the frames that run the script."""
    # The runner of scripts does not belong to the user's program.
    kept = [
        frame
        for frame in traceback.extract_tb(frames)
        if "runpy" not in frame.filename and frame.filename != __file__ and Path(frame.filename).parent.name != "mpi4py"
    ]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(kept)] if kept else []
    sys.stderr.write("".join([*lines, *traceback.format_exception_only(kind, error)]))
    sys.stderr.flush()


def main() -> None:
    """Runs the script or module that the arguments name, like `python -m mpi4py`."""
    from mpi4py.run import main as run

    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        # Whole lines: written in parts, those of several ranks run into each other.
        reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = show_error
    run()


if __name__ == "__main__":
    main()
