PYTHON ?= python3
BIN := .venv/bin
JOBS ?= auto
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup

# The first import of a module keeps its bytecode; pip, which would do so for all of them, takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train eval test test-all quick mutants lint drill gpu-check bench kernels clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: .venv/installed  ## make .venv and install everything into it, once

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.txt -e '.[dev]'
	touch $@

train: setup  ## set up, then train the embedded default: minutes on a CPU; ARGS="model.scope=5" to change it
	$(BIN)/python train.py $(ARGS)

eval: setup  ## evaluate what make train made, on its test split
	$(BIN)/python eval.py checkpoint=runs/quickstart/best.pt split=test $(ARGS)

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## set up, then ruff, mypy and every test that CI runs: 6 minutes on two cores
	$(PYTEST) --durations=20 -m "not interpreter and not long"
	TRITON_INTERPRET=1 $(PYTEST) --durations=20 -m "interpreter and not long"

test-all: lint  ## the same with what is long by nature: every kernel for every GPU, the long drill
	$(PYTEST) --durations=20 -m "not interpreter"
	TRITON_INTERPRET=1 $(PYTEST) --durations=20 -m interpreter
	$(BIN)/python -m scripts.drill

quick: setup  ## 2 minutes: the tests of what changed, or of a room: ROOM=data
	$(PYTEST) -m "not interpreter and not long and not slow and not compile" $(or $(ROOM:%=tests/%),$$($(BIN)/python scripts/changed_rooms.py))

mutants: setup  ## plant the faults of tests/faults and print those that no test sees; ARGS="data --only seed"
	$(BIN)/python scripts/mutants.py $(ARGS)

drill: setup  ## do to runs what machines do to them, and say what was lost; ARGS="only=[kill]"
	$(BIN)/python -m scripts.drill $(ARGS)

gpu-check: setup  ## on a machine with a GPU: tests, benchmark and report on the device, in one file to send back
	$(BIN)/python scripts/bench/gpu.py

bench: setup  ## time the operators against the rigid convolution and torchvision, as ratios
	$(BIN)/python -m dkcls bench what=ops

kernels: setup  ## registers, spills, shared memory and instructions of every Triton kernel
	$(BIN)/python scripts/bench/kernels.py

clean:  ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
