"""Tiles in the memory of CUDA GPUs, of any library that speaks DLPack or `__cuda_array_interface__`.

    cuda              the driver (libcuda), by ctypes: pinned buffers and strided copies
    device_arrays     where an array lies on its GPU, and how to make another of its kind
    staging           a move through the host: GPU -> pinned chunks -> shared window -> move -> and back
    device_messages   a move by messages between GPUs, if MPI accepts pointers to device memory

Importing these needs no GPU: the driver is loaded when the first such tile comes. Without a driver the call raises
`TileError` on all ranks, and an error of the driver during a move is a `RankError`.
"""
