"""The MPI runtime: a rank for each device, numpy tiles, and all ranks make each call together.

The life of one call, here `reshard.mpi.redistribute`, and where it can fail:

    0 begin     the threads of a rank      take turns; the ranks have a team          collective, turns, meeting
    1 prepare   each rank for itself       plans, picks a way, checks its arguments   prepare, run_plan, direct
    2 agree     all ranks                  compare digests of their requests          agreement, team
    3 where     ranks of a node            post where their tiles lie                 window_tiles, node.node_sync
    4 move      peers                      copies inside a node, messages beyond      ways, wire, node
    5 finish    all ranks                  nobody returns before all are done         collective

    in 0        a rank that makes no call: the others meet in vain, and raise `RankError` within `limit`
    in 1 and 2  a wrong argument of any kind, planning that takes too long, or ranks with different requests: the same
                error on all ranks, and nothing has moved
    in 4        an exception on one rank: `team.moving` reports it to all, whose waits end with `RankError`. The team is
                broken, and the next call builds a new one. `out` is untouched or complete, unless the budget has no
                room to hold back what arrives
    in 3 and 4  a node without room for more shared memory: all its ranks go on with private memory and messages
    anywhere    a rank that died or is stuck: the others' waits end with `RankError` after `limit` seconds. A rank that
                skipped the call finds their reports in its next one, and goes on with them in a new team

Steps 2 and 3 are one synchronization: the digest and the words travel together. A call that is repeated finds the
results of step 1 in caches, and an array that is made like an earlier one has the digest of step 2 at hand. A small
move inside a node that is repeated, or made by a handle, has steps 2 to 4 in one synchronization, and no step 5: see
`staged`.

The ways of step 4, `ways` has the details:

    by node     many short messages between nodes: joined in the node's memory, few long ones in their place
    pull        tiles in shared windows: each rank copies what it needs out of its peers' tiles (or pushes)
    read        private tiles with long runs: the same, through the kernel
    stage       private tiles: copied or packed into a window, then pulled
    messages    private tiles of a node without room for windows: as between nodes
    plan        the plan's steps, message by message: reductions and tight budgets
    overwrite   the plan's one exchange inside a donated tile: the tightest budgets

Modules, lowest first; each imports only from those above it (`node.cma_read` alone stands above `direct`):

    strided_copy    copies between strided views of numpy arrays
    stream_copy     large copies, past the caches by a C extension where it was built
    pool            buffers that are used again
    tags            the tags of all messages
    limits          how long a call may take: a positive number of seconds
    meeting         all ranks come, or give up in time, before what blocks inside MPI
    node/           what ranks of a node share: memory in an arena, synchronization, reading memory through the kernel
    team            the ranks of a communicator: nodes, agreement primitives, waits with a limit, failure reports
    window_tiles    where a rank's tile lies, and what it posts to its node
    agreement       all ranks make the same call, or all raise the same error
    intercomm       inter-communicators: their groups merged, and layouts that count the ranks of a group
    turns           the threads of a rank take turns on a communicator
    collective      one call from its arguments to its end
    wire/           messages between ranks: how blocks are cut, packed, sent, reduced
    node_price      whether messages between nodes are better joined
    copy_order      the order of copies into one tile
    direct          straight from source to target: copies inside a node, messages between nodes
    fused_copies    strided copies at equal distances, as one
    run_plan        the steps of a plan, one after another
    run_view        the same of a plan with views and casts, on flat tiles
    bundle          several arrays at once: straight to their results, with one message for each peer
    tree_schedule   which arrays of a tree move together, and in which order
    shared_stack    equal moves of a tree into arrays of the caller, through copies that the node shares
    tree_run        a tree's call, part after part
    prepare         a rank's part of a request: the plan, the way, the buffers
    ways, move      the ways, and the call that takes one
    staged          small moves inside a node, through memory that it shares
    repeated        what a communicator keeps of the requests it has had, and the calls that use it
    indices         the global indices of a tile
    global_array    arrays that lie on one rank: scatter and gather
    measure         latency and bandwidth of a communicator
    checksum        checksums of arrays that are the same in every layout
    gpu/            tiles on GPUs: staged through the host, or sent from GPU to GPU
"""
