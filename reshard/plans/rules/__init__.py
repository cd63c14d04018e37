"""The typing rules: which steps there are, which layouts each leads from and to, and what it costs.

A rule takes a step's operand, result and mode. It returns the step's `Cost`, or raises `StepError` with the reason.

    slice            local digits become held by unused sub-axes
    all_gather       held digits become local
    all_to_all       held digits become local, local ones held by the same axes
    permute          the same tiles on other devices
    exchange         any layout to any layout, as messages in rounds, perhaps through a view
    reduce_scatter   partial sub-axes come to hold local digits
    all_reduce       partial sub-axes become replicated
    split_sum        sub-axes in use or not become partial

Steps that change the array's dims, its extent or its dtype, and send nothing:

    view             the same elements under other indices
    take, put        part of an array kept, or written into one that is there
    cast             the same elements in another dtype

    collectives.py   check_step, RULES, the table of the above, and the rule of each; step_loads, device by device
    view_steps.py    the rules of steps that change indices
    step_mode.py     Cost, StepMode, and what all rules share
    tile_view.py     a tile as the blocks that a collective sends; shared with the lowering
    split_steps.py   a step split into smaller steps of the same kind
    bounds.py        the least that any plan receives: of one array, through a view, of several together
    lane.py          which steps can share a launch

To add a collective: write its rule in collectives.py, with a table of an example's digits before and after; enter
it in RULES; give it an instruction in `lower.program`, which every runtime then has to run; and add a row above and in
docs/reference/language.md. The tests that go over RULES fail until each of these is there.

The runtimes do not read these costs. They count the bytes that they move and the memory that they hold, and tests
compare the two: a runtime that took its figures from here would confirm a wrong rule.
"""

from reshard.plans.rules.collectives import RULES as RULES
from reshard.plans.rules.collectives import check_step as check_step
from reshard.plans.rules.step_mode import FREE as FREE
from reshard.plans.rules.step_mode import PLAIN as PLAIN
from reshard.plans.rules.step_mode import Cost as Cost
from reshard.plans.rules.step_mode import StepMode as StepMode
