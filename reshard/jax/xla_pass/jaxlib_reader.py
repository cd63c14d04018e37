"""`JaxlibReader`: serialized modules, read by the jaxlib that compiles them."""

# jaxlib's own modules have no stubs.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib
from typing import Any


class JaxlibReader:
    """Serialized modules as jaxlib reads them."""

    def __init__(self) -> None:
        self._last: tuple[bytes, Any] | None = None

    def _read(self, module: bytes) -> Any:
        """The module; the last one is kept, since one is asked for twice."""
        if self._last is None or self._last[0] is not module:
            self._last = module, _hlo().HloModule.from_serialized_hlo_module_proto(module)
        return self._last[1]

    def text(self, module: bytes) -> str:
        """The text of a module, large constants included."""
        options = _hlo().HloPrintOptions()
        options.print_large_constants = True
        return self._read(module).to_string(options)

    def shardings(self, module: bytes) -> tuple[str, ...]:
        """The shardings of the entry's parameters, empty if the module does not say."""
        shardings = self._read(module).spmd_parameters_shardings
        return tuple(str(_hlo().HloSharding.from_proto(one)) for one in shardings or ())


def _hlo() -> Any:
    """jaxlib's own module for HLO, which has no public name."""
    return importlib.import_module("jaxlib._hlo")
