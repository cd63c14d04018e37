"""Which steps: the planner, and the networks that it plans for. Every plan is checked by the typing rules.

plan       the best checked plan from one layout to another
plan_tree  the plans of many arrays, in batches that share launches
overlapped a plan to other devices in parts, each gathered while the next one crosses
Network    what bytes cost along each axis of a mesh: presets by name, JSON, or your own figures
Link       the cost of one axis: seconds a message, bytes a second

sweeps     many plans: a table of them, the cheapest way through alternative layouts
planner    asks the routes, compares what they cost; plans of few messages, and in parts that overlap
routes     candidate steps, one algorithm a file; how to add one
cost       predicted seconds of a step
options    what a caller asks for, read once
budget     steps cut until a plan fits
moves plans of moves with a view, a part or a cast, around an ordinary plan
tree_batches many arrays: which share launches, in which order, and what fits a budget
network    `Network`, and the presets: the figures of known machines
wires      `Link`; what rings, lines and tori carry; where a mesh lies on physical axes
"""

from reshard.synth.network import Link as Link
from reshard.synth.network import Network as Network
from reshard.synth.options import PlanOptions as PlanOptions
from reshard.synth.planner import find_plan as find_plan
from reshard.synth.planner import find_tree_plan as find_tree_plan
from reshard.synth.planner import overlapped as overlapped
from reshard.synth.planner import plan as plan
from reshard.synth.planner import plan_tree as plan_tree
