"""Runs reads and writes: bytes by `preadv`, coded chunks by the libraries of their formats; counts and checks them.

    drivers       pieces that only the library of their format reads and writes
    sidecar       checksums of what a save wrote, and which files are of one save

Every stored byte is read once.
"""
