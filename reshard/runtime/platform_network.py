"""The network of a call: what the environment names where the call names none, and the text that ranks compare."""

from __future__ import annotations

import os
from functools import lru_cache

from reshard.errors import ReshardError, quoted
from reshard.synth import Network
from reshard.synth.network import PRESETS
from reshard.synth.options import read_network

VARIABLE = "RESHARD_NETWORK"
"""The environment variable: a preset, a file as `reshard calibrate` writes it, or "none"."""


def choose_network(given: Network | str | None) -> Network | str | None:
    """What a caller gives, else what the environment names, not loaded yet; None if neither does.

    >>> choose_network("h100")
    'h100'
    """
    return os.environ.get(VARIABLE) or None if given is None else given


def spell_network(given: Network | str | None) -> str:
    """A network as ranks compare it: the name of a preset, else all figures, those of a file included.

    So two networks with the same name differ if their figures do. Anything else is quoted.

    >>> spell_network("h100") == spell_network(Network.preset("h100")) == "h100"
    True
    >>> one, other = (spell_network(Network.of({"x": (1e-6, bandwidth)}, "lab")) for bandwidth in (9e10, 8e10))
    >>> one == other
    False
    """
    try:
        network = read_network(load_once(given))
        return network.name if network is not None and PRESETS.get(network.name) == network else repr(network)
    except (ReshardError, OSError, ValueError):  # The call says what is wrong, on all ranks.
        return quoted(given)


def load_once(given: Network | str | None) -> Network | str | None:
    """What a caller gives, with the network in the place of a file's name: reading it takes longer than a small move.

    A file is read again when it has changed.
    """
    if not isinstance(given, str) or given == "none" or given in PRESETS:
        return given
    try:
        status = os.stat(given)
    except (OSError, ValueError):  # Whoever reads it says what is wrong.
        return given
    return _load_file(given, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _load_file(path: str, modified: int, size: int) -> Network:
    return Network.load(path)
