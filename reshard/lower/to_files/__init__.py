"""Reads and writes of files: which bytes of which file are which elements of a tile, neighbours in one call."""
