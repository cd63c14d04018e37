"""Reads and writes of files: which bytes of which file are which elements of a tile, neighbours in one call.

file_reads    blocks between pieces and tiles, spans of a file that several tiles share, calls that read them
file_writes   which process writes which elements of a tile: each once, evenly
"""
