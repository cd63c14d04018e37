"""ScaLAPACK's `pdgemm`, and the dgemm that it calls, for tiles of C's order: what `summa.py` compares itself with.

Rows in C's order are columns in Fortran's. So Fortran sees all matrices transposed, on the transposed grid, and the
product is that of B and A.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[np.float64]


def load_scalapack() -> Any:
    """ScaLAPACK's library for this MPI; None if it is not installed."""
    ctypes.CDLL(MPI.__file__, ctypes.RTLD_GLOBAL)  # It calls this MPI then, and not the one that it would load.
    vendor = "mpich" if MPI.get_vendor()[0] == "MPICH" else "openmpi"
    try:
        return ctypes.CDLL(f"libscalapack-{vendor}.so.2.2")
    except OSError:
        return None


def refer(argument: Any) -> Any:
    """The address of an argument, as Fortran takes it."""
    kinds = {int: ctypes.c_int, float: ctypes.c_double}
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    return ctypes.byref(kinds[type(argument)](argument)) if type(argument) in kinds else argument


def add_by_dgemm(library: Any, a: Array, b: Array, c: Array) -> None:
    """Adds the product of this rank's matrices to C."""
    of_b, of_a, of_c = ((tile, tile.strides[0] // 8) for tile in (b, a, c))
    library.dgemm_(b"N", b"N", *map(refer, (b.shape[1], *a.shape, 1.0, *of_b, *of_a, 1.0, *of_c)))


def prepare_pdgemm(
    library: Any, grid: tuple[int, int], block: int, shape: tuple[int, int, int], a: Array, b: Array
) -> Callable[[Array], None]:
    """What adds the product of matrices to C, m by k and k by n, in blocks that are dealt out on a grid of ranks."""
    (m, n, k), context = shape, ctypes.c_int()
    library.Cblacs_get(-1, 0, ctypes.byref(context))
    library.Cblacs_gridinit(ctypes.byref(context), b"C", grid[1], grid[0])

    def describe(tile: Array, rows: int, columns: int) -> tuple[Any, ...]:
        numbers = 1, context.value, rows, columns, block, block, 0, 0, tile.strides[0] // 8
        return tile, 1, 1, (ctypes.c_int * 9)(*numbers)

    def add_product(c: Array) -> None:
        ends = (*describe(b, n, k), *describe(a, k, m), 1.0, *describe(c, n, m))
        library.pdgemm_(b"N", b"N", *map(refer, (n, m, k, 1.0, *ends)))

    return add_product
