"""The typing rules: which steps there are, which layouts each leads from and to, and what it costs.

A rule takes a step's operand, result and mode. It returns the step's `Cost`, or raises `StepError` with the reason.

    slice            local digits become held by unused sub-axes                 slice.py
    all_gather       held digits become local                                    all_gather.py
    all_to_all       held digits become local, local ones held by the same axes  all_to_all.py
    permute          the same tiles on other devices                             permute.py
    exchange         any layout to any layout, as messages in rounds             exchange.py
    reduce_scatter   partial sub-axes come to hold local digits                  reduce.py
    all_reduce       partial sub-axes become replicated                          reduce.py
    split_sum        sub-axes in use or not become partial                       split_sum.py

Steps that change the array's dims, its extent or its dtype; only `view_exchange` sends anything:

    view             the same elements under other indices                       view.py
    take, put        part of an array kept, or written into one that is there    view.py
    cast             the same elements in another dtype                          view.py
    view_exchange    any layout to any layout under a view, in rounds            view_exchange.py

    checker.py       check_step, and RULES, the table of the above
    cost.py          Cost, StepMode, and what all rules share
    tile_view.py     a tile as the blocks that a collective sends; shared with the lowering
    parts.py         a step split into smaller steps of the same kind
    bounds.py        the least that any plan between two layouts receives; view_bounds.py, under a view
    joint_bounds.py  the same of several arrays together
    loads.py         what each device receives and sends in a step
    lane.py          which steps can share a launch

To add a collective: write its rule in a file of its own, with a table of an example's digits before and after; enter
it in RULES; give it an instruction in `lower.program`, which every runtime then has to run; and add a row above and in
docs/language.md. The tests that go over RULES fail until each of these is there.

The runtimes do not read these costs. They count the bytes that they move and the memory that they hold, and tests
compare the two: a runtime that took its figures from here would confirm a wrong rule.
"""

from reshard.types.rules.checker import RULES as RULES
from reshard.types.rules.checker import check_step as check_step
from reshard.types.rules.cost import FREE as FREE
from reshard.types.rules.cost import PLAIN as PLAIN
from reshard.types.rules.cost import Cost as Cost
from reshard.types.rules.cost import StepMode as StepMode
