# Everything runs in .venv, which `make setup` creates; PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'csrc/*.inl')

.DEFAULT_GOAL := help
.PHONY: help setup build kernel demo test test-gpu sanitize lint format report clean

help:  ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

setup: $(BIN)/.installed  ## create .venv with the pinned requirements

build: setup  ## compile the library in place (CUDA if nvcc is found)
	$(BIN)/python setup.py --quiet build_ext --inplace

kernel: setup  ## rebuild one kernel: make kernel FILE=fwd_sm80 D=128
	$(BIN)/python setup.py --quiet build_ext --inplace --kernel=$(FILE) --head-dim=$(D)

demo: build  ## the eval on gpt2-mini and smollm2: eager, sdpa and hf_fused
	$(BIN)/python -m eval demo

test: build  ## lint and the CPU test suite
	$(MAKE) --no-print-directory lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS)

test-gpu: build  ## the GPU test suite
	$(BIN)/python -m pytest -m gpu

sanitize: build  ## the short list of GPU calls under compute-sanitizer
	$(BIN)/python tests/sanitize.py

lint: setup  ## ruff and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: setup  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

report: setup  ## render the tables of README.md and docs from eval/results
	$(BIN)/python -m eval report
	$(BIN)/python -m hf_flash_backend --support > docs/support.md

clean:  ## remove build outputs (not .venv, not .cache)
	rm -rf build dist *.egg-info hf_flash_backend/libhf_flash_backend.so hf_flash_backend/build_info.json
