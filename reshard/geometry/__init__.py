"""What two layouts of one array have in common: the facts that rules, bounds, routes and lowering are built on.

    refine.py           the numeral whose digits both layouts are made of, if there is one; digits released by sub-axes
    remesh.py           the same placement, written on another mesh of the same devices; sets of devices
    detect.py           a layout read in any notation, on the caller's mesh
    blocks.py           which elements of a sender's tile are which of a receiver's: nested loops over both
    overlap.py          the elements of a dim that two pieces share: blocks, counts, the shortest run
    holders.py          which devices hold a tile
    message.py          one message, a product of what two tiles share of each dim; the requests for a tile
    messages.py         who sends what to whom: of all devices, or of one
    dealing.py          how holders share the requests for a tile, from the sums of a queue
    figures.py          what an exchange takes: rounds, messages, the bytes of each device
    exchange_stats.py   the figures among the same devices, from the pieces of each group of dims
    device_loads.py     which messages devices send and receive, by their shapes
    crossing.py         the figures between two sets of devices: who sends, how much, how many rounds
    relay.py            such an exchange in two rounds of messages: to devices that pass elements on, then from them
    pieces.py           extents cut into pieces of bounded size

Through a view, indices of the two differ:

    view_layouts.py     both layouts on the atoms of the view; a move as split dims, an ordinary move, merged dims
    view_boxes.py       boxes of atoms, and what the tiles of both sides have in common

Nothing here knows what a step is; that is for the rules in `plans`.
"""
