"""Boolean options: the one check behind `donate`, `cast`, `padded`, `launches` and the other flags of the package.

donate=True, donate=np.True_      True
donate="no", donate=1             refused: text is true of itself, and 1 may have been meant for another argument
"""

from __future__ import annotations

from reshard.errors import PlanError, ReshardError, quoted

_NUMPY = ("bool", "bool_")


def checked_flag(value: object, what: str, error: type[ReshardError] = PlanError) -> bool:
    """The value as a bool of Python; raises `error` for anything but True and False, numpy's included.

    >>> checked_flag(False, "donate")
    False
    >>> checked_flag("no", "donate")
    Traceback (most recent call last):
    reshard.errors.PlanError: donate 'no': give True or False
    """
    if value is True or value is False:
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in _NUMPY:
        return bool(value)
    raise error(f"{what} {quoted(value)}: give True or False")
