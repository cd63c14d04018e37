"""Runs reads and writes: bytes by `preadv`, coded chunks by the libraries of their formats; counts and checks them."""
