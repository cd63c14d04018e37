"""The transforms of a 3-D FFT on a grid of ranks: each dim is local in turn. Run by `docs/explanation/mpi.md`."""

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import DistArray

comm = MPI.COMM_WORLD
mesh = rs.Mesh(p=2, q=2)
pencils = rs.Layout.from_spec(mesh, (8, 16, 32), "complex128", [["p"], ["q"], []])

whole = np.arange(8 * 16 * 32).reshape(pencils.shape) % 7
a = DistArray.from_function(lambda i, j, k: whole[i, j, k], pencils, comm)
for dim in (2, 1, 0):
    a = a.redistribute(dim)
    a.tile[...] = np.fft.fft(a.tile, axis=dim)
    if comm.rank == 0:
        print(f"dim {dim} is local: {a.layout}")

result = a.to_global(root=0)
if comm.rank == 0:
    print("as numpy has it:", np.allclose(result, np.fft.fftn(whole)))
