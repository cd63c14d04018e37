"""Plans: chains of steps from a source to a target, checked as they are built, for one array or many.

    step.py                 Step; what is live on each device while steps run
    plan.py                 Plan, its figures; Batch and TreePlan of many arrays, whose steps share launches
    plan_data.py            plans as JSON, and back; the names of many arrays
    descriptors.py          plans as lists of transfers, for other transports
    rules/                  one typing rule a collective, and the bounds, parts and loads that fold over them
    rechunk_plan.py         what other chunks of a stored array cost: regions, windows, spills
    stored.py               what is stored in files, which loads read
    manifest.py             what both sides of a move must agree on
    pipeline.py             a plan to other devices in parts that overlap

An unchecked step or plan cannot exist: their constructors call the rules. So whoever makes plans, the planner or a
JSON file, need not be trusted.
"""
