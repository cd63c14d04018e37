"""What two layouts of one array have in common: the facts that rules, bounds, routes and lowering are built on.

    refine.py           the numeral whose digits both layouts are made of, if there is one; digits released by sub-axes
    remesh.py           the same placement, written on another mesh of the same devices; sets of devices
    detect.py           a layout read in any notation, on the caller's mesh
    blocks.py           which elements of a sender's tile are which of a receiver's: nested loops over both, and how
                        they are cut into pieces of bounded size
    cover.py            whether parts of one target meet, and what none of them fills
    overlap.py          what two pieces of a dim share: blocks, counts, the shortest run
    holders.py          tiles and who holds them; what devices keep of theirs, and what they lack
    dealing.py          how holders share the requests for a tile, from the sums of a queue
    messages.py         who sends what to whom: of all devices, or of one
    relay.py            an exchange in two rounds of messages: to devices that pass elements on, then from them
    figures.py          what an exchange takes, on any devices: rounds, messages, the bytes of each device
    exchange_stats.py   its figures among the same devices, from the pieces of each group of dims
    view_layouts.py     through a view, where indices of the two differ: layouts on its atoms; a move as split dims, an
                        ordinary move, merged dims; and what tiles share, as boxes of atoms

Nothing here knows what a step is; that is for the rules in `plans`.
"""
