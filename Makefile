# make bench and make test do all the set-up they need; a second run starts at once.
#
#   VENV=.venv      the virtual environment, made where it is missing
#   TORCH=2.14.0    the torch to install in it; another value reinstalls and rebuilds
#   PYTHON=python3  the interpreter that makes VENV, 3.10 or newer
#   ARGS=           passed on to the benchmark
#   MEMKIT_CUDA, TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX, MAX_JOBS: see setup.py

VENV ?= .venv
TORCH ?= 2.14.0
PYTHON ?= python3
ARGS ?=
OUT ?= build/gpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.memkit
CORE := $(STAMPS)/torch-$(TORCH)
INSTALLED := $(STAMPS)/installed
BUILT := $(STAMPS)/built
LINTERS := $(STAMPS)/linters

SOURCES := setup.py setup_checks.py $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')
CPP_FILES = $(shell find csrc tests/cpp -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')

# Tools of the environment (ninja, nvcc from the wheels) before those of the machine.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: setup build bench bench-ops test test-all lint format wheel gpu clean FORCE
.DELETE_ON_ERROR:

setup: $(INSTALLED)
build: $(BUILT)

bench: $(BUILT)
	$(BIN)/memkit bench $(ARGS)

bench-ops: $(BUILT)
	$(BIN)/python benchmarks/bench_activation.py $(ARGS)

test: $(BUILT)
	$(MAKE) --no-print-directory -C tests/cpp
	$(BIN)/python -m pytest -q -m "not slow" $(ARGS)

test-all: $(BUILT)
	$(MAKE) --no-print-directory -C tests/cpp
	$(BIN)/python -m pytest -q $(ARGS)

lint: $(LINTERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy memkit
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(LINTERS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

wheel: $(INSTALLED)
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

# For a GPU machine that has torch but no network: uses PYTHON as it is, installs nothing.
gpu:
	PYTHON="$(PYTHON)" benchmarks/gpu.sh "$(OUT)"

clean:
	rm -rf build dist *.egg-info memkit/_build_info.py memkit/_C.*.so
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache $(STAMPS)/built

# The set-up, in stamps: each is redone when what it was made from is newer.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "memkit: needs Python 3.10 or newer, got $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch, what compiles against it, and nvcc from the wheels where torch is a CUDA build and the machine has none.
$(CORE): setup_checks.py | $(BIN)/python
	@mkdir -p $(STAMPS)
	@rm -f $(STAMPS)/torch-*
	$(PIP) install -q "torch==$(TORCH)" "setuptools>=77.0.3" ninja numpy
	wheels=$$($(BIN)/python setup_checks.py cuda-wheels) && if [ -n "$$wheels" ]; then $(PIP) install -q $$wheels; fi
	@touch $@

$(INSTALLED): $(CORE) pyproject.toml setup.py
	$(PIP) install -q --no-build-isolation -e '.[test,bench]'
	@touch $@

# ninja recompiles what changed. A build from another VENV overwrites the binary in the tree, hence the last line's names.
$(BUILT): $(INSTALLED) $(SOURCES) $(or $(wildcard memkit/_build_info.py),FORCE) $(or $(wildcard memkit/_C.*.so),FORCE)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

$(LINTERS): $(CORE) pyproject.toml
	$(PIP) install -q $$($(BIN)/python setup_checks.py extra lint)
	@touch $@
