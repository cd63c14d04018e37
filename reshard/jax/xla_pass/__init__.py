"""The pass inside XLA: plans in the place of chains of collectives, in modules that XLA has partitioned (jax >= 0.11).

xla_hook           registers the pass with XLA: `enable`, `disable`, `enabled`
hlo_pass           the pass on one module; `hlo_files` on a module in a file
chain_plans        which plans, shifts and operations are asked for in the place of a chain
fragments          plans compiled for the module's platform; `shift_fragments` and `op_fragments` shifts and operations
compiling_thread   where fragments are compiled: XLA's own thread is inside a compilation
jaxlib_reader      serialized modules as jaxlib reads them
program_peaks      asks the compiler for the peak of the program that it is compiling
persistent_cache   keeps jax's cache of programs apart from what the pass compiles
jitted, lowered    `reshard.jax.jit` by this pass: the function, and its program before and after it is compiled
"""
