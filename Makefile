# make bench and make test do all the set-up they need; a second run starts at once.
#
#   VENV=.venv      the virtual environment, made where it is missing
#   TORCH=2.14.0    the torch to install in it; another value reinstalls and rebuilds
#   PYTHON=python3  the interpreter that makes VENV, 3.10 or newer
#   ARGS=           passed on to the benchmark or to pytest
#   JOBS=           tests at a time: the number of cores, 4 at most
#   MEMKIT_CUDA, TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX, MAX_JOBS: see setup.py

VENV ?= .venv
TORCH ?= 2.14.0
PYTHON ?= python3
ARGS ?=
OUT ?= build/gpu
# At a time: C++ tests, and processes of pytest.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.memkit
CORE := $(STAMPS)/torch-$(TORCH)
EXTRAS := $(STAMPS)/extras
MODELS := $(STAMPS)/models
ENGINES := $(STAMPS)/engines
BUILT := $(STAMPS)/built
INSTALLED := $(STAMPS)/installed
LINTERS := $(STAMPS)/linters

CODE := -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh'
SOURCES := setup.py setup_checks.py $(shell find csrc $(CODE))
BINARY := $(or $(wildcard memkit/_build_info.py),FORCE) $(or $(wildcard memkit/_C.*.so),FORCE)

.PHONY: setup build bench bench-ops bench-models bench-matrix test test-all test-torches test-simt test-emulated lint format wheel gpu clean FORCE
.DELETE_ON_ERROR:

setup: $(CORE) $(EXTRAS)
build: $(BUILT) $(INSTALLED)

bench: build
	$(BIN)/memkit bench $(ARGS)

bench-ops: build
	$(BIN)/python benchmarks/bench_ops.py $(ARGS)

bench-models: build $(MODELS)
	$(BIN)/python benchmarks/bench_models.py $(ARGS)

bench-matrix: build $(MODELS) $(ENGINES)
	$(BIN)/python benchmarks/bench_matrix.py $(ARGS)

# Targets of tests/cpp, then pytest with arguments; both run, whatever the first says.
define run_tests
@cpp=0; $(MAKE) -j$(JOBS) --output-sync=target --no-print-directory --keep-going -C tests/cpp $(1) || cpp=$$?; \
  $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(2) $(ARGS) && \
  if [ $$cpp != 0 ]; then echo "memkit: C++ tests failed, see above" >&2; exit $$cpp; fi
endef

test: build $(MODELS)
	$(call run_tests,run,-m "not slow")

test-all: build $(MODELS) $(ENGINES) test-simt
	$(call run_tests,run long,)

# The torches that memkit is for beside TORCH, each in an environment of its own.
TORCHES ?= 2.11.0 2.13.0 2.15.0

test-torches:
	for torch in $(TORCHES); do $(MAKE) test TORCH=$$torch VENV=$(VENV)-$$torch || exit; done

# CUDA's kernels without a GPU: built for the CPU, where threads take turns (tests/simt), and given the tensors there.
SIMT := $(foreach t,activation activation_bias activation_edges channel_norm dropout dropout_forms glu linear_loss loss norm \
  norm_denominators norm_inplace optim_8bit optim_operators pooling rotary rotary_inplace softmax,tests/test_$(t).py)
# Rows whose elements lie apart are laid out for these kernels on CUDA tensors alone. Bounds to stock's CPU kernels that these, which sum in the type computed in, miss by some units in the last place.
# Gradients of weights come to the bit as they do among others on the CPU alone, where long rows are also added up in parts.
SIMT_NOT := tests/test_channel_norm.py::test_gradients_wanted_alone tests/test_norm.py::test_one_value_above_all_others[262144 \
  tests/test_softmax.py::test_float64_against_long_double tests/test_norm.py::test_as_exact_as_stock \
  tests/test_loss.py::test_against_float64[all-torch.float32-far] \
  tests/test_linear_loss.py::test_as_exact_as_stock[soft-torch.float32-none-None]

# SANITIZE=1: built and run with the address sanitizer, which sees the tensors' memory, as PyTorch takes it from malloc.
SANITIZED := CFLAGS="-fsanitize=address"
UNDER_ASAN := LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0

test-simt: $(EXTRAS)
	MEMKIT_CUDA=simt $(if $(SANITIZE),$(SANITIZED)) $(BIN)/python setup.py -q build --build-lib build/simt
	$(if $(SANITIZE),$(UNDER_ASAN)) PYTHONPATH=build/simt $(BIN)/python -P -m pytest -q -n $(JOBS) --dist worksteal \
	  -m "not slow" -k "not apart" $(SIMT) $(SIMT_NOT:%=--deselect '%') $(ARGS)

# The GPU's tests without a GPU: CUDA's runtime on the CPU (tests/simt/runtime.cpp), with PyTorch's operators and memkit's
# kernels over it. Left out: sizes that take threads in turns too long, and a peak of stock's kernels, which are the CPU's here.
EMULATED := build/emulated
EMULATED_NOT := tests/test_cuda.py::test_more_elements_than_the_grid_covers_at_a_time tests/test_cuda_loss.py::test_peak

test-emulated: $(EXTRAS)
	MEMKIT_CUDA=emulated $(BIN)/python setup.py -q build --build-lib $(EMULATED)
	LD_PRELOAD="$$(echo $(EMULATED)/memkit/_cuda.*.so)" PYTHONPATH=$(EMULATED) $(BIN)/python -P -m pytest -q -n $(JOBS) \
	  --dist worksteal -m "cuda and not slow" $(EMULATED_NOT:%=--deselect '%') $(ARGS)

lint: $(LINTERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy memkit tests/typed.py
	find csrc tests/cpp tests/simt $(CODE) | xargs $(BIN)/clang-format --dry-run -Werror

format: $(LINTERS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc tests/cpp tests/simt $(CODE) | xargs $(BIN)/clang-format -i

wheel: $(CORE)
	rm -rf build/lib.*
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .
	@rm -rf memkit.egg-info

# For a GPU machine that has torch but no network: takes PYTHON as it is and installs nothing.
gpu:
	PYTHON="$(PYTHON)" benchmarks/gpu.sh "$(OUT)"

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache memkit/_build_info.py memkit/_C.*.so $(BUILT)
	find memkit tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The set-up, in stamps: each is redone when what it was made from is newer.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "memkit: needs Python 3.10 or newer, got $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch, what builds against it, and an nvcc from PyPI where torch is a CUDA build and this machine has no nvcc for it.
$(CORE): | $(BIN)/python
	@mkdir -p $(STAMPS)
	@rm -f $(STAMPS)/torch-*
	$(PIP) install -q "torch==$(TORCH)" "setuptools>=77.0.3" ninja numpy
	@wheels="$$($(BIN)/python setup_checks.py cuda-wheels)" && \
	  if [ -n "$$wheels" ]; then echo "nvcc from PyPI: $$wheels" && $(PIP) install -q $$wheels; fi
	@touch $@

$(EXTRAS): $(CORE) pyproject.toml
	$(PIP) install -q $$($(BIN)/python setup_checks.py extra test bench)
	@touch $@

# Libraries whose models are tested and measured. A torchvision goes with one torch, the index's with the index's: where it
# does not load it would stop transformers, which does without, as its own models' and timm's tests do.
$(MODELS): $(CORE) pyproject.toml
	$(PIP) install -q "torch==$(TORCH)" $$($(BIN)/python setup_checks.py extra models)
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || \
	  { echo "memkit: torchvision from the index does not load into torch $(TORCH): going on without it and timm" >&2; \
	    $(PIP) uninstall -q -y torchvision; }
	@touch $@

$(ENGINES): $(CORE) pyproject.toml
	$(PIP) install -q "torch==$(TORCH)" $$($(BIN)/python setup_checks.py extra distributed)
	@touch $@

$(LINTERS): $(CORE) pyproject.toml
	$(PIP) install -q $$($(BIN)/python setup_checks.py extra lint)
	@touch $@

# In place, by ninja, which recompiles what changed. BINARY: another VENV may have written its own there since.
$(BUILT): $(CORE) $(EXTRAS) $(SOURCES) $(BINARY)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# The memkit command and the metadata; finds all objects built. An egg-info left in the tree would tell every other
# environment of this torch.
$(INSTALLED): $(CORE) pyproject.toml setup.py | $(BUILT)
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@rm -rf memkit.egg-info
	@touch $(BUILT) $@
