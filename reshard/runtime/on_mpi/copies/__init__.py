"""Copies between memory that this process sees: strided views, large ones past the caches, and in which order.

strided_copy   copies between strided views of numpy arrays
stream_copy    large copies, past the caches where the C extension `_stream.c` was built
run_copy       very many short runs, by index
copy_order     the order of copies into one tile, and copies at equal distances as one
"""
