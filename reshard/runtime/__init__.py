"""Runs programs, and measures what they take.

simulate    a plan on numpy, all devices in one process
run         a lowered program, the same way
Account     bytes live and received, per device, of one call
measure     the accounts of all calls inside a `with`
"""

from reshard.runtime.account import Account as Account
from reshard.runtime.account import Measured as Measured
from reshard.runtime.account import measure as measure
from reshard.runtime.on_numpy import run as run
from reshard.runtime.on_numpy import simulate as simulate
