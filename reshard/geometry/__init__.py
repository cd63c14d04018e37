"""What two layouts of one array have in common: the facts that rules, bounds, routes and lowering are built on.

    refine.py           the numeral whose digits both layouts are made of, if there is one; digits released by sub-axes
    remesh.py           the same placement, written on another mesh of the same devices; sets of devices
    detect.py           a layout read in any notation, on the caller's mesh
    overlap.py          the elements of a dim that two pieces share: runs, progressions, counts, the shortest run
    blocks.py           which elements of a sender's tile are which of a receiver's: nested loops over both
    message.py          one message: the elements that one device sends to another
    messages.py         who sends what to whom in an exchange of boxes
    own_messages.py     one device's messages of such an exchange, without listing those of others
    holders.py          which devices hold a tile
    device_loads.py     which messages devices send and receive, by their shapes
    exchange_stats.py   the figures of an exchange, in closed form where dims are even or in contiguous pieces
    pieces.py           a box cut into pieces of bounded size
    crossing.py         an exchange between two sets of devices: who sends, how much, how many rounds
    dealing.py          how holders share the requests for a tile, from the sums of a queue
    relay.py            such an exchange in two rounds of messages: to devices that pass elements on, then from them

Through a view, indices of the two differ:

    view_layouts.py     both layouts on the atoms of the view; a move as split dims, an ordinary move, merged dims
    view_boxes.py       boxes of atoms, and what two of them have in common
    view_messages.py    who sends what to whom, where digits and atoms do not align

Nothing here knows what a step is; that is for the rules in `plans`.
"""
