"""A corpus of whole programs: what the compiler pass, the doctor and strict mode are tested on.

    for program in PROGRAMS:
        mesh = program.make_mesh()
        with program.entered(mesh):
            case = program.build(mesh)
            jax.jit(case.f, **case.jit)(*case.args)

`build` takes any mesh with the program's axes whose sizes divide what it shards (`make_mesh_of_one`: each of size 1).
All arrays come from fixed seeds.
"""

from tests.jax.programs import kernels, models, ops, reports_experts, reports_hpc, reports_ml
from tests.jax.programs.base import Case as Case
from tests.jax.programs.base import Program as Program

PROGRAMS: tuple[Program, ...] = (
    *models.PROGRAMS,
    *kernels.PROGRAMS,
    *ops.PROGRAMS,
    *reports_ml.PROGRAMS,
    *reports_experts.PROGRAMS,
    *reports_hpc.PROGRAMS,
)
BY_NAME = {program.name: program for program in PROGRAMS}
