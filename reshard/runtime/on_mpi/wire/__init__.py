"""Messages between ranks.

    chunks             blocks cut into messages, the same at sender and receiver; those of several arrays as one
    message_exchange   posts, packs, sends, receives and unpacks them, within bounded buffers
    by_node            short messages between nodes, joined by node

    schedule (lower.to_mpi) -> chunks -> message_exchange -> MPI

Every wait goes through `call.watch`, so that a peer's failure or the time limit ends it. Messages are nonblocking, on
the team's private communicator.
"""
