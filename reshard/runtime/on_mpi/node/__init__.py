"""What the ranks of one node share.

    node_sync    a small window in which ranks post words, wait for each other, and report failure
    windows      shared memory for tiles, reused once all ranks have released it
    huge_pages   huge pages for that memory, on Linux
    cma          reading another process's private memory through the kernel (`process_vm_readv`)
    cma_read     tiles read that way, straight or through a small buffer

`team` builds the first four into each `Team`; `cma_read` is used by `ways`, and imports `direct` for that. Windows and
syncs are collective among the node's ranks; reading through the kernel is not: a rank reads while its peers copy or
wait. A rank that fails writes a text to its `NodeSync`, at which every waiting peer looks.
"""
