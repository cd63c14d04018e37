"""Messages between ranks.

    chunks       blocks cut into messages, and where their elements lie in a tile
    datatypes    MPI datatypes for messages that MPI packs itself
    messages     all messages of a step, the same at sender and receiver; those of several arrays as one
    by_node      short messages between nodes, joined by node
    exchange     posts, packs, sends, receives and unpacks them, within bounded buffers
    reduction    reduce-scatter and all-reduce, by MPI's own collectives
    overwrite    an exchange inside the memory of a donated tile

    schedule (lower.to_mpi) -> messages -> chunks -> exchange -> MPI

Every wait goes through `call.watch`, so that a peer's failure or the time limit ends it. Messages are nonblocking, on
the team's private communicator.
"""
