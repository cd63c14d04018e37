"""Shardings of whole programs, chosen by the cost of plans and emitted as the plans' own collectives.

    autoshard     the face: what a user calls, and what is returned
    trace_step    the program as one StableHLO function, and what its arguments and results are called
    op_rules      which dims of an operation's operands and results go together
    localize      one operation on the tiles of one device
    step_flow     the program as plain data: values, loops, how often what runs, and the layouts of all that
    clusters      which operations are split alike
    liveness      which values lie in memory, and until when: as a step is written, or as a compiler ran it
    loop_fusion   what XLA for CPUs fuses into loops, and in which order its kernels run
    op_work       the operations and bytes that an operation takes
    graph         the program as a `Problem` of `synth.choice`, and an `Assignment` as the layouts of its operations
    emit          those layouts as one program on tiles, with the collectives of plans between them
    wrap_module   an emitted program as a function of JAX, with the trees, the shardings and the donation of the step
    fixed_specs   what the caller fixes, by paths of arguments and results
    explain       a choice in words: how arguments lie and are used, the dearest moves, those of a rival
    experts       the shardings that an expert would write, as a module to compile beside what was chosen
    search        what is compiled: the choice, again if it exceeds the budget, and what experts write
    calibration   what the devices at hand take: their links and their speed, measured and kept
    compiled_figures  what a compiled program takes: bytes, seconds of its collectives, peak, work

Everything inside the emitted program is local: no compiler is left to decide what moves.
"""
