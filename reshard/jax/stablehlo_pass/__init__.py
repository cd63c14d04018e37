"""The pass before partitioning: plans in the place of sharding constraints, in StableHLO that XLA has not seen yet.

module_pass        the pass on one module: `transform`
explicit_reshards  Shardy's propagation, after which every reshard is an operation
rewrite            each reshard replaced: by the plan's collectives, by a constraint, or by nothing
shardy_ops         Shardy's operations that XLA does not import, spelled in those that it does
shardings          the meshes, shardings and layouts of a module's values
handover           the one place that decides in which form XLA gets shardings
"""
