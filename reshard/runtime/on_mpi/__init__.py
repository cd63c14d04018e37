"""The MPI runtime: a rank for each device, numpy tiles, and all ranks make each call together.

The life of one call, here `reshard.mpi.redistribute`, and where it can fail:

    0 begin     the threads of a rank      take turns; the ranks have a team          collective, team
    1 prepare   each rank for itself       plans, picks a transport, checks its arguments   prepare, run_plan
    2 agree     all ranks                  compare digests of their requests          collective, team
    3 where     ranks of a node            post where their tiles lie                 window_tiles, node.node_sync
    4 move      peers                      copies inside a node, messages beyond      transports, wire, node
    5 finish    all ranks                  nobody returns before all are done         collective

    in 0        a rank that makes no call: the others meet in vain, and raise `RankError` within `limit`
    in 1 and 2  a wrong argument of any kind, planning that takes too long, or ranks with different requests: the same
                error on all ranks, and nothing has moved
    in 4        an exception on one rank: `team.report_failure` tells all, whose waits end with `RankError`. The team
                is broken, and the next call builds a new one. `out` is untouched or complete, unless the budget has no
                room to hold back what arrives
    in 3 and 4  a node without room for more shared memory: all its ranks go on with private memory and messages
    anywhere    a rank that died or is stuck: the others' waits end with `RankError` after `limit` seconds. A rank that
                skipped the call finds their reports in its next one, and goes on with them in a new team

Steps 2 and 3 are one synchronization: the digest and the words travel together. A call that is repeated finds the
results of step 1 in caches, and an array that is made like an earlier one has the digest of step 2 at hand. A small
move inside a node that is repeated, or made by a handle, has steps 2 to 4 in one synchronization, and no step 5: see
`repeated`. A handle whose ranks each talk to few others has none: these wait for each other alone, see `fetch`.

The transports of step 4 are in a table of `transports`.

Modules, lowest first; each imports only from those above it:

    copies/         copies between strided views: blocked, in order, past the caches by a C extension where built
    node/           what ranks of a node share: memory in an arena, synchronization, reading memory through the kernel
    team            the ranks of a communicator: nodes, meetings, turns of threads, waits with a limit, failure reports
    window_tiles    where a rank's tile lies, and what it posts to its node
    collective      one call from its arguments to its end; agreement: all ranks go on, or all raise the same error
    wire/           messages between ranks: how blocks are cut, packed, sent, and joined by node
    direct_moves    straight from source to target: copies inside a node, messages between nodes
    fetch           calls in which a rank waits for its neighbours alone: moves between few, and boxes that ranks name
    global_array    the indices of a tile, sums that do not depend on the layout
    run_plan        the steps of a plan, one after another: messages, reductions, casts, an exchange in place
    prepare         a rank's part of a request for a tile: the plan, the transport, the buffers
    transports      how one array's elements get to their results, and the call that takes one of the ways
    launches        which arrays of a call move together, in which order, and how each launch runs
    repeated        what a communicator keeps of the requests it has had, and the calls that use it
    gpu             tiles on GPUs: staged through the host, or sent from GPU to GPU; not run on a GPU so far
"""
