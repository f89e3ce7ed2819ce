# `make demo` and `make test` need only Python >= 3.11. Each target sets up .venv first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2
TESTS ?=
NAMES ?=
STAMP := $(VENV)/.installed

.PHONY: demo test test-system test-all check docs notebooks soak bench published clean help

help:
	@echo "make demo         train a CNN on digits over 8 simulated devices; results in runs/demo/"
	@echo "make test         the quick tests (at most 5 minutes on 2 cores; WORKERS=8 uses more, TESTS=tests/wire runs a part)"
	@echo "make test-system  the system tests: processes, notebooks, pages, examples, long trainings"
	@echo "make test-all     all tests, the slow ones too, with all of XLA's optimizations"
	@echo "make check        formatting, lint, types, architecture, documentation"
	@echo "make docs         the documentation site, in site/"
	@echo "make notebooks    execute the notebooks and keep what they show; NAMES=04 executes one"
	@echo "make soak         20 minutes of random faults, without and with checkpoints in memory; the runs must end in the same bits"
	@echo "make bench        benchmarks; results in benchmarks/results/"
	@echo "make published    plans of published runs, against what was measured; needs '.[gpu-compiler]'"
	@echo "make clean        remove .venv, runs and what was built"

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "spmd needs Python 3.11 or newer; this is %d.%d" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(RUN) examples/demo.py

# TESTS="tests/wire tests/train" runs a part.
test: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not system" $(TESTS)

test-system: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "system and not slow" $(TESTS)

test-all: $(STAMP)
	SPMD_TEST_OPTIMIZED=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

check: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) tools/words.py
	$(RUN) -m pyright
	$(RUN) -m pytest tests/test_architecture.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs: $(STAMP)
	$(RUN) -m mkdocs build --strict

# One after the other, each in a process: which one, and how long it took.
notebooks: $(STAMP)
	$(RUN) tools/notebooks.py $(NAMES)

soak: $(STAMP)
	$(RUN) tests/distributed/soak.py --minutes 20 --seed 0 --compare

bench: $(STAMP)
	$(RUN) benchmarks/step_overhead.py

published: $(STAMP)
	$(RUN) benchmarks/published/run.py
	$(RUN) benchmarks/published/sites.py

clean:
	rm -rf $(VENV) runs build dist site
