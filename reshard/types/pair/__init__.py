"""What two layouts of one array have in common: the facts that rules, bounds, routes and lowering are built on.

    refine.py           the numeral whose digits both layouts are made of, if there is one
    remesh.py           the same placement, written on another mesh of the same devices
    runs.py             runs of neighbouring elements, and progressions of equal runs
    overlap.py          the elements of a dim that two pieces share, as progressions
    shared.py           how many elements of a dim two pieces share
    shortest.py         the shortest run that they share
    message.py          one message: the elements that one device sends to another
    messages.py         who sends what to whom in an exchange of boxes
    holders.py          which devices hold a tile
    own_messages.py     one device's messages of such an exchange, without listing those of others
    dim_groups.py       dims in groups that use different device coordinates
    device_loads.py     which messages devices send and receive, by their shapes
    exchange_stats.py   the figures of such an exchange, without listing its messages
    contiguous_stats.py these figures in closed form, for a dim in contiguous pieces
    pieces.py           a box cut into pieces of bounded size
    device_sets.py      whether two meshes have the same devices, some in common, or none
    crossing.py         an exchange between two sets of devices: who sends, how much, how many rounds
    dealing.py          how holders share the requests for a tile, from the sums of a queue
    tile_queues.py      the queue of each tile; tiles that are asked for alike share one
    kept.py             what devices of both sets keep, and how many pieces overlap, as lists over devices
    relay.py            such an exchange in two turns: to devices that pass elements on, then from them
    relay_loads.py      how much each device passes on there, so that the busiest sends the least
    lacking.py          what each device lacks of its target tile
    released.py         a layout without some sub-axes: the digits that they held are local

Through a view, indices of the two differ:

    view_layouts.py     both layouts on the atoms of the view, where they can be written so
    view_stages.py      a move as dims opened, an ordinary move, dims closed
    view_boxes.py       boxes of atoms, and what two of them have in common
    view_messages.py    who sends what to whom, where digits and atoms do not align

Nothing here knows what a step is; that is for the rules.
"""
