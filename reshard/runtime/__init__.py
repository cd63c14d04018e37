"""Runs programs and measures them."""

from reshard.runtime.on_numpy import Memory as Memory
from reshard.runtime.on_numpy import run as run
