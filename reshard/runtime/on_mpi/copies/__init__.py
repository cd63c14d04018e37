"""Copies between memory that this process sees: strided views, large ones past the caches, and in which order.

strided_copy   copies between strided views of numpy arrays, and of very many short runs, by index
stream_copy    large copies, past the caches where the C extension `_stream.c` was built
copy_order     the order of copies into one tile, and copies at equal distances as one
"""
