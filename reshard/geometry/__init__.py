"""What two layouts of one array have in common: the facts that rules, bounds, routes and lowering are built on.

Nothing here knows what a step is; that is for the rules in `plans`.
"""
