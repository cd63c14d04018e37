"""What the ranks of one node share.

    node_sync    a little memory in which ranks post words, wait for each other, and report failure
    arena        memory for tiles, which all of them map: allocated before it is touched, in huge pages on Linux, and
                 reused once all ranks have released it
    cma          reading another process's private memory through the kernel (`process_vm_readv`)

`team` builds a `NodeSync`, an `Arena` and a `RemoteMemory` into each `Team`. Acquiring memory and syncs are collective
among the node's ranks; reading through the kernel is not: a rank reads while its peers copy or wait. A rank that fails
writes a text to its `NodeSync`, at which every waiting peer looks.
"""
