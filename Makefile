# moerl: `make demo` trains a tiny mixture-of-experts model on this machine, `make test` runs every check.
# PYTHON chooses the interpreter (3.11, 3.12 or 3.13), VENV the folder of the environment.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
# The SGLang servers' own environment; Python 3.11.
SGLANG_VENV ?= .venv-sglang
SGLANG_PYTHON ?= python3.11
CONFIG ?= configs/demo/gspo.yaml
GROUPS ?=
ARGS ?=
export OMP_NUM_THREADS ?= 1
export SGLANG_PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint sft sglang test-sglang clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@echo "  Variables: PYTHON=python3.12  VENV=.venv  CONFIG=configs/demo/grpo.yaml  ARGS='optim.lr=1e-4'  GROUPS='unit'"

setup:  ## make the virtual environment, or bring it up to date
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) tools/setup.py --venv $(VENV)

demo: setup  ## set up, then train: CONFIG with ARGS
	@$(VENV)/bin/moerl train $(CONFIG) $(ARGS)

test: setup  ## set up, then every check and test (GROUPS chooses some)
	@$(VENV)/bin/python tools/run_tests.py $(GROUPS)

lint: setup  ## only ruff, basedpyright and import-linter
	@$(VENV)/bin/python tools/run_tests.py lint

sft: setup  ## rebuild the demo's warm start by supervised training
	@$(VENV)/bin/moerl train configs/demo/sft.yaml run.resume=never $(ARGS)
	@if cmp runs/demo-sft/hf/model.safetensors configs/demo/policy/model.safetensors; \
		then echo 'the rebuilt policy equals the shipped one, bit for bit'; \
		else echo 'the rebuilt policy, runs/demo-sft/hf, is not the shipped one. The matrix' \
			'products of another processor than it was built on round otherwise (seen on an Intel Xeon)' >&2; exit 1; fi

sglang:  ## make the environment of the SGLang servers, or bring it up to date
	@$(SGLANG_PYTHON) tools/setup_sglang.py --venv $(SGLANG_VENV)

test-sglang: setup sglang  ## the real SGLang: its parser, its buckets, and servers on this machine (minutes)
	@MOERL_SGLANG_PYTHON=$(SGLANG_VENV)/bin/python $(VENV)/bin/python -m pytest -m '' -s --durations=0 tests/sglang

clean:  ## remove the environment and caches that these targets made; never runs/
	@for venv in $(VENV) $(SGLANG_VENV); do if [ -f $$venv/moerl-venv ]; then rm -rf $$venv; fi; done
	@rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist moerl.egg-info
	@find moerl tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
