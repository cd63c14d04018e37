"""The pass before partitioning: plans in the place of sharding constraints, in StableHLO that XLA has not seen yet.

module_pass        the pass on one module: `transform`
explicit_reshards  Shardy's propagation, after which every reshard is an operation
rewrite            each reshard replaced: by the plan's collectives, by a constraint, or by nothing; and the one place
                   that decides in which form XLA gets shardings
user_shardings     the shardings that the user gave, by line, and changes of them
causes             which of these the places of a report stand between
shardy             meshes, shardings and layouts of a module's values, and Shardy's operations that XLA does not import
"""
