# `make demo` and `make test` need only Python >= 3.11. Each target first installs what it needs into .venv, once.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2
TESTS ?=
ENGINES ?= tests/engines tests/distributed/test_slurm_hosts.py
NAMES ?=

# Modules are compiled when they are first imported, each once: compiling all that is installed takes longer than installing it.
export PYTHONDONTWRITEBYTECODE :=

# Installed: the packages of the examples, those of the tests too, and those of the checks and the documentation too.
EXAMPLES := $(VENV)/.examples
TEST := $(VENV)/.test
DEV := $(VENV)/.dev

# `environment`, or nothing if there is one to use: its Python has the version of $(PYTHON), and all of pip, which writes INSTALLER last.
WITH_PIP := import sys, importlib.metadata; importlib.metadata.distribution("pip").read_text("INSTALLER") and print(sys.version_info[:2])
ENVIRONMENT := $(shell [ "$$($(RUN) -c '$(WITH_PIP)' 2>&1)" = "$$($(PYTHON) -c 'import sys; print(sys.version_info[:2])' 2>&1)" ] || echo environment)

# $(call install,EXTRA,WHAT IT BRINGS)
define install
	@echo "installing into $(VENV): spmd, JAX, Flax and $(2) ..."
	@began=$$(date +%s); \
	    $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -e '.[$(1)]' && \
	    echo "installed in $$(($$(date +%s) - began)) s"
	@touch $@
endef

.PHONY: environment demo test test-system test-all test-engines check docs notebooks soak faults bench published clean help

help:
	@echo "make demo         train a CNN on digits over 8 simulated devices; results in runs/demo/"
	@echo "make test         the quick tests (at most 5 minutes on 2 cores; WORKERS=8 uses more, TESTS=tests/wire runs a part)"
	@echo "make test-system  the system tests: processes, notebooks, pages, examples, long trainings"
	@echo "make test-all     all tests, the slow ones too, with all of XLA's optimizations"
	@echo "make test-engines jobs started by real engines: SLURM, Ray, Open MPI, MPICH, torchrun; installs them"
	@echo "make check        formatting, lint, types, architecture, documentation"
	@echo "make docs         the documentation site, in site/"
	@echo "make notebooks    execute the notebooks and keep what they show; NAMES=04 executes one"
	@echo "make soak         20 minutes of random faults, without and with checkpoints in memory; the runs must end in the same bits"
	@echo "make faults       every file-system call of small runs fails, one after the other (hours; tests/faults/sweep.py tries a part)"
	@echo "make bench        benchmarks; results in benchmarks/results/"
	@echo "make published    plans of published runs, against what was measured; needs '.[gpu-compiler]'"
	@echo "make clean        remove .venv, runs and what was built"

environment:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "spmd needs Python 3.11 or newer; this is %d.%d" % sys.version_info[:2])'
	@[ ! -e $(VENV) ] || echo "$(VENV) is incomplete or of another Python than $(PYTHON): it is made again"
	@$(PYTHON) -m venv --clear $(VENV)

$(EXAMPLES): pyproject.toml $(ENVIRONMENT)
	$(call install,examples,what the examples need (scikit-learn and matplotlib; 800 MB in all))

$(TEST): pyproject.toml $(ENVIRONMENT)
	$(call install,test,what the tests need (1.3 GB in all))
	@touch $(EXAMPLES)

$(DEV): pyproject.toml $(ENVIRONMENT)
	$(call install,dev,what checks and documentation need (1.5 GB in all))
	@touch $(EXAMPLES) $(TEST)

demo: $(EXAMPLES)
	@$(RUN) examples/demo.py

# TESTS="tests/wire tests/train" runs a part.
test: $(TEST)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not system" $(TESTS)

test-system: $(DEV)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "system and not slow" $(TESTS)

test-all: $(DEV)
	SPMD_TEST_OPTIMIZED=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

test-engines: $(DEV)
	tools/install_engines.sh $(PYTHON)
	$(RUN) -m pytest -rs -m system $(ENGINES)

check: $(DEV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) tools/words.py
	$(RUN) -m pyright
	$(RUN) -m pytest tests/test_architecture.py tests/test_tolerances.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs: $(DEV)
	$(RUN) -m mkdocs build --strict

# One after the other, each in a process: which one, and how long it took.
notebooks: $(DEV)
	$(RUN) tools/notebooks.py $(NAMES)

soak: $(DEV)
	$(RUN) tests/distributed/soak.py --minutes 20 --seed 0 --compare

faults: $(DEV)
	$(RUN) tests/faults/sweep.py

bench: $(DEV)
	$(RUN) benchmarks/step_overhead.py

published: $(DEV)
	$(RUN) benchmarks/published/run.py
	$(RUN) benchmarks/published/sites.py

clean:
	rm -rf $(VENV) .venv-engines runs build dist site
