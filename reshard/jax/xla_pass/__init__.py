"""The pass inside XLA: plans in the place of chains of collectives, in modules that XLA has partitioned.

xla_hook        registers the pass with XLA: `enable`, `disable`, `enabled`; and keeps jax's cache of programs apart
hlo_pass        the pass on one module: which plans, shifts and operations it asks for; `hlo_files` on one in a file
fragments       plans, shifts and operations on rows, compiled for the module's platform
program_peaks   asks the compiler for the peak of the program that it is compiling; and the threads of such compilations
measured_programs  compiles for figures alone, on CPU only until buffers are assigned

`reshard.jax.jit` switches this pass on for one function.
"""
