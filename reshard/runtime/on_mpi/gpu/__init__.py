"""Tiles in the memory of CUDA GPUs, of any library that speaks DLPack or `__cuda_array_interface__`.

    cuda_arrays   where an array lies on its GPU, how to make another of its kind, and the driver's copies, by ctypes
    gpu_moves     a move through the host, or by messages between GPUs if MPI accepts pointers to device memory

**Not run on a GPU so far**: the tests run all of it on a fake driver, and on a real one where they find one.

Importing these needs no GPU: the driver is loaded when the first such tile comes. Without a driver the call raises
`TileError` on all ranks, and an error of the driver during a move is a `RankError`.
"""
