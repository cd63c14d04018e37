"""Runs programs and measures them."""

from reshard.runtime.measure import Measured as Measured
from reshard.runtime.measure import measure as measure
from reshard.runtime.on_numpy import Memory as Memory
from reshard.runtime.on_numpy import run as run
