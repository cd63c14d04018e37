"""Runs reads and writes: bytes by `preadv`, coded chunks by the libraries of their formats; counts and checks them.

    drivers       pieces that only the library of their format reads and writes
    engine        tiles of readings: spans of neighbours in one call, chunks once, and counts of both
    reader_thread where the tiles of a wave lie, and the thread that reads a wave while another moves
    host_load     all waves of a load whose devices are all in this process
    stored_boxes  boxes of one tensor, read and written within a number of bytes
    rechunking    the plan of other chunks: windows that target chunks come out of, and spill files
    writing       tiles as spans of new files, from copies if the tiles go on changing
    save_targets  what a save writes to: files laid out here, or stores that a library makes
    commit        files of several processes become a checkpoint in one step, or not at all
    result_memory   memory for results: what has died, or new, in huge pages as long as these come at once
    sidecar       checksums of what a save wrote, and which files are of one save

Every stored byte is read once.
"""
