"""The network that the environment names, for calls that name none."""

from __future__ import annotations

import os

from reshard.synth import Network

VARIABLE = "RESHARD_NETWORK"
"""The environment variable: a preset, a file as `reshard calibrate` writes it, or "none"."""


def named(given: Network | str | None) -> Network | str | None:
    """What a caller gives, else what the environment names, not loaded yet; None if neither does.

    >>> named("h100")
    'h100'
    """
    return os.environ.get(VARIABLE) or None if given is None else given
