# Everything runs from a virtual environment in .venv, made on first use.
PYTHON ?= python3
TORCH ?= 2.13.0
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
export LONG_RUNS ?= $(HOME)/innerloop-long-runs
PIP := $(BIN)/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test bench bench-eager bench-memory docs format clean \
	long-runs long-runs-status long-runs-pause long-runs-resume long-runs-stop

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## the README's example, then few-shot learning: pictures in out/demo (two minutes)
	rm -rf out/demo
	$(BIN)/python examples/first.py
	$(BIN)/innerloop maml --out out/demo

test: $(VENV)/dev.stamp ## lint, type check, tests and docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: ## time and memory of innerloop and its peers (makes their environments; two hours)
	$(PYTHON) benchmarks/peers.py

bench-eager: ## time innerloop_ctx against higher (some minutes)
	$(PYTHON) benchmarks/run.py

bench-memory: ## memory and time over inner steps, against higher (an hour or two)
	$(PYTHON) benchmarks/memory.py

long-runs: $(LONG_RUNS)/venv.stamp ## start or continue the queue of long runs, in the background
	$(PYTHON) benchmarks/long_runs.py start

long-runs-status: ## what each long run has reached; writes it to benchmarks/results
	@$(PYTHON) benchmarks/long_runs.py status

long-runs-pause: ## suspend them, while something is timed
	@$(PYTHON) benchmarks/long_runs.py pause

long-runs-resume: ## let them go on
	@$(PYTHON) benchmarks/long_runs.py resume

long-runs-stop: ## end them after a checkpoint; make long-runs continues
	@$(PYTHON) benchmarks/long_runs.py stop

docs: $(VENV)/dev.stamp ## show the documentation at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: $(VENV)/dev.stamp ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove environments, caches and results
	rm -rf $(VENV) benchmarks/.venv* site out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --clear: an environment that was left half made (no ensurepip, Ctrl-C) is made again.
$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'innerloop needs Python 3.10 or newer. Name one: make PYTHON=python3.11' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# A stamp for each version of torch, so that `make test TORCH=...` installs the one asked for.
# torch goes in first, so that no dependency of the others can choose its version.
$(VENV)/torch-$(TORCH).stamp: $(VENV)/venv.stamp
	$(PIP) torch==$(TORCH)
	@rm -f $(VENV)/torch-*.stamp
	@touch $@

$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch-$(TORCH).stamp
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch-$(TORCH).stamp
	$(PIP) -e '.[dev]'
	@touch $@

# An environment of the long runs' own: they go on with the same torch while .venv changes.
# innerloop itself comes from their clone; what is installed here are its dependencies.
$(LONG_RUNS)/venv.stamp:
	$(PYTHON) -m venv --clear $(LONG_RUNS)/venv
	$(LONG_RUNS)/venv/bin/python -m pip install --disable-pip-version-check torch==$(TORCH)
	$(LONG_RUNS)/venv/bin/python -m pip install --disable-pip-version-check '.[experiments]'
	@touch $@
