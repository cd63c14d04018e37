"""The network of a call: what the environment names where the call names none, and the text that ranks compare.

What was measured on a machine is kept in a file of the user's cache, one for each kind of device or of job:

    $RESHARD_CACHE                the folder; else reshard in $XDG_CACHE_HOME, else ~/.cache/reshard
    here-tpu-v5p.json             the network and the speed of the TPU v5p of the machine called `here`
    here-mpich-8-ranks-1-nodes.json   the network of 8 MPI ranks on it

It is taken where neither a call nor the environment names a network, and all processes of a job have the same. As
nobody asked for it, it may cost no memory.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from reshard.errors import NetworkError, ReshardError, quoted
from reshard.synth import Network
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.network import PRESETS
from reshard.synth.options import PlanOptions

P = TypeVar("P")

VARIABLE = "RESHARD_NETWORK"
"""The environment variable: a preset, a file as `reshard calibrate` writes it, or "none"."""
CACHE = "RESHARD_CACHE"
"""The environment variable that names the folder of what was measured."""


class Calibration(NamedTuple):
    """What was measured on some devices: the links between them, and how fast each works; None of MPI ranks."""

    network: Network
    speed: DeviceSpeed | None


def store_calibration(kind: str, measured: Calibration) -> Path:
    """Keeps what was measured of devices of a kind for later processes of the user on this machine."""
    path = _place_calibration(kind, os.environ.get(CACHE))
    network, speed = measured
    both = {
        "network": json.loads(network.to_json()),
        "speed": speed and {**speed.__dict__, "flops": dict(speed.flops)},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: other processes may read it now.
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(both, indent=2), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise NetworkError(f"{quoted(str(path))} cannot be written ({error}); let {CACHE} name a folder") from None
    _read_calibration.cache_clear()
    return path


def find_calibration(kind: str) -> Calibration | None:
    """What was measured of devices of a kind on this machine, None if nobody did; `NetworkError` for a damaged file."""
    return _read_calibration(kind, os.environ.get(CACHE))


def find_calibration_folder(folder: str | None = None) -> Path:
    """Where calibrations are kept: a folder that is given, or named by the environment, or the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder or os.environ.get(CACHE) or os.path.join(home, "reshard"))


def _place_calibration(kind: str, folder: str | None) -> Path:
    # Homes are shared by machines whose links differ.
    name = re.sub(r"[^a-z0-9]+", "-", f"{platform.node()} {kind}".lower()).strip("-")
    return find_calibration_folder(folder) / f"{name}.json"


@lru_cache(maxsize=64)
def _read_calibration(kind: str, folder: str | None) -> Calibration | None:
    # Kept while the process lives: small moves would wait longer for a file than for their data.
    path = _place_calibration(kind, folder)
    try:
        both = json.loads(path.read_text(encoding="utf-8"))
        speed = both["speed"]
        return Calibration(Network.from_json(json.dumps(both["network"])), speed and DeviceSpeed(**speed))
    except OSError:
        return None
    except (ReshardError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NetworkError(f"{quoted(str(path))} is damaged ({error}); delete it, or calibrate again") from None


def find_shared_network(kind: str, gather: Callable[[str], list[str]]) -> Network | NetworkError | None:
    """The network that all processes of a job have measured, or the error of all; None where they differ.

    `gather` returns the text of each process, on all of them.
    """
    _read_calibration.cache_clear()  # Another process of this job may have written since.
    try:
        measured = find_calibration(kind)
        found = None if measured is None else measured.network
    except NetworkError as error:
        found = error
    return found if len(set(gather(repr(found)))) == 1 else None


def plan_within_fewest(options: PlanOptions, find: Callable[[PlanOptions], P], needs: Callable[[P], int]) -> P:
    """What is found for some options; for a network that nobody named, only if it needs no more memory than what is
    found without one."""
    found = find(options)
    if options.network_named or options.network is None:
        return found
    fewest = find(options._replace(network=None))
    return found if needs(found) <= needs(fewest) else fewest


def name_network(given: Network | str | None) -> Network | str | None:
    """What a caller gives, else what the environment names; None if neither does. A file that is named is read once,
    and again when it has changed: reading takes longer than a small move.

    >>> name_network("h100")
    'h100'
    """
    named = os.environ.get(VARIABLE) or None if given is None else given
    if not isinstance(named, str) or named == "none" or named in PRESETS:
        return named
    try:
        status = os.stat(named)
    except (OSError, ValueError):  # Whoever reads it says what is wrong.
        return named
    return _load_file(named, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _load_file(path: str, modified: int, size: int) -> Network:
    return Network.load(path)


def spell_network(network: Network | None) -> str | None:
    """A network as ranks compare it: the name of a preset, else all figures, since those of one name may differ.

    >>> spell_network(Network.preset("h100"))
    'h100'
    """
    if network is None:
        return None
    return network.name if PRESETS.get(network.name) == network else repr(network)
