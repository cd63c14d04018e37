"""The programs of `benchmarks/programs.py`: `PROGRAMS` has them by name."""

from benchmarks.real_programs import (
    by_hand,
    jax_layouts,
    jax_models,
    later_steps,
    model_libraries,
    newest_steps,
    optimizers,
    science,
    shipped_models,
    shipped_science,
    training_steps,
    transformers_models,
    unseen_steps,
)
from benchmarks.real_programs.base import PROGRAMS as PROGRAMS
from benchmarks.real_programs.base import Case as Case
from benchmarks.real_programs.base import Scale as Scale

MODULES = (
    by_hand,
    jax_models,
    jax_layouts,
    transformers_models,
    model_libraries,
    optimizers,
    science,
    shipped_models,
    shipped_science,
    training_steps,
    later_steps,
    newest_steps,
    unseen_steps,
)
