"""Fewest launches: a bounded search shows that no shorter plan exists within the same bytes and memory, or finds one.

    search     `fewest`: the search from a plan downwards, what a step really costs, and the verdict
    encoding   the typing rules as conditions for z3
    space      layouts as choices: which digit each factor of the mesh holds

The search knows the typing rules but nothing of the planner. z3 searches for steps from the source to the target with
fewer launches, and with at most the plan's bytes and memory. What it finds is priced by the rules themselves and built
as a plan, which is checked like every plan. If it finds nothing, its conditions are the proof: they have no solution.
"""

from reshard.proofs.launches.search import check_limit as check_limit
from reshard.proofs.launches.search import fewest as fewest
