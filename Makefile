# One entry for people and for CI: `make` shows what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.PHONY: help setup run-stack generate test test-all coverage fuzz-manager chaos outages lint fix types verify-protos proto update-lock reference site
.PHONY: test-core test-stacks nightly pictures capture clean base dev tools python

VENV ?= .venv
PY := $(VENV)/bin/python
# What the environment was made with holds until a switch says otherwise.
PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)
SYSTEM_TORCH ?= $(if $(shell grep -s 'include-system-site-packages = true' $(VENV)/pyvenv.cfg),1)
SET_UP = $(PYTHON) ops/set_up.py $(VENV) $(if $(filter 1 yes true,$(SYSTEM_TORCH)),--system-torch) \
  $(if $(filter command environment,$(origin PYTHON)),--this-python) \
  $(if $(TORCH_INDEX_URL),--torch-index '$(TORCH_INDEX_URL)')

# Reaches its recipe as data, whatever quotes or dollars it holds.
override export PROMPT := $(value PROMPT)
ARGS ?=
# The checkout itself, also for an environment that it is not installed in.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

##@ Use

help: ## Show this help
	@awk 'BEGIN { FS = ":.*## "; print "make TARGET" } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z][a-z-]*%?:.*## / { sub("%", "NAME", $$1); printf "  %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nSettings\n'; printf '  %-20s %s\n' \
	  'PYTHON=...' 'Python 3.11 or newer that makes the environment' \
	  'SYSTEM_TORCH=1' 'use the torch, triton and transformers of that Python (0: install them)' \
	  'TORCH_INDEX_URL=...' 'index that a new environment takes torch from; builds for CPUs are half the size' \
	  'VENV=...' 'an environment of yours, used as it is; nothing is installed' \
	  'ARGS="..."' 'more arguments for the program behind a target'

setup: base ## Make the environment and the default model; does nothing when they are there

run-stack: base ## Start Redis, cachemgr, executor and scheduler; Ctrl-C stops them
	@exec $(PY) ops/run_stack.py $(ARGS)

generate: base ## Ask the running stack: make generate PROMPT="What is the capital of France?"
	@[ -n "$${PROMPT:-}" ] || { echo 'say what to ask: make generate PROMPT="What is the capital of France?"' >&2; exit 2; }
	@printf %s "$$PROMPT" | $(PY) -m scheduler.generate $(ARGS) -

##@ Check

test: dev ## Run the tests of every service, all day: about four minutes on two slow cores; ARGS="-k name" chooses
	@$(PY) -m pytest -n auto --dist loadfile -m "not slow and not model" $(ARGS)

test-all: dev ## Run all tests; those that start processes come last, and again when they fail; ARGS="-k name" chooses
	@$(MAKE) -k test-core test-stacks

test-core: dev
	@$(PY) -m pytest -n auto --dist loadfile -m "not processes" $(ARGS)
test-stacks: dev
	@$(PY) -m tests.second_chance -n 2 --dist loadfile -m processes $(ARGS)

coverage: dev ## Print the branch coverage of the cache manager and the scheduler by their own tests
	@rm -f build/coverage/data*
	@$(PY) -m coverage run -m pytest -n auto --dist loadfile -m "not slow and not model" \
	  tests/conformance tests/unit/cachemgr tests/unit/cachemgr_service tests/unit/scheduler tests/unit/router tests/unit/rpc \
	  tests/console $(ARGS)
	@$(PY) -m coverage combine -q
	@for service in cachemgr scheduler; do $(PY) -m coverage report --include="$$service/*"; done

fuzz-manager: dev ## New random lives of the cache manager; ARGS="--seconds 3600" at night
	@$(PY) -m tests.fuzz.cache_manager $(ARGS)

chaos: dev ## Kill, pause and disturb a stack under load for ten minutes; ARGS="--fleet", "--ray", "--seconds 90 --seed 2"
	@$(PY) -m tests.chaos $(ARGS)

outages: dev ## Show what callers see while each process is paused, killed, late or full; ARGS="--only 'pause cachemgr'"
	@$(PY) -m tests.chaos.outages $(ARGS)

nightly: dev ## Run what is left to chance: all tests, new seeds, load, newest packages; ARGS="--minutes 60 --only chaos"
	@$(PY) -m tests.nightly $(ARGS)

lint: tools ## Check style, formatting, the generated pages of docs/ and the deadlines of tests; `make fix` repairs
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@$(VENV)/bin/lint-imports
	@$(PY) ops/reference.py
	@$(PY) ops/check_deadlines.py

fix: tools ## Repair what lint finds
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .
	@$(PY) ops/reference.py --write

reference: tools ## Write the generated pages of docs/ again: settings, metrics, HTTP API, RPCs, kvctl, families of models
	@$(PY) ops/reference.py --write

site: tools ## Build docs/ as a site in build/site, which opens without a server; wrong links and anchors are errors
	@$(PY) -m mkdocs build --strict

types: tools ## Check types
	@$(PY) -m mypy && MYPYPATH=ops $(PY) -m mypy ops/*.py
	@MYPYPATH=ops $(PY) -m mypy -p tests -p bench

verify-protos: tools ## Check the .proto files and that the stubs belong to them; `make proto` repairs
	@$(PY) ops/stubs.py verify
proto: tools ## Generate the stubs
	@$(PY) ops/stubs.py generate

update-lock: tools ## Let everything that is installed be the newest version: ops/constraints.txt is written anew
	@$(PY) ops/update_lock.py

##@ Measure

.PHONY: bench exactness eval-eviction peers
bench: dev ## Run a benchmark: make bench NAME=serving ARGS="--help"; without NAME, list them
	@$(PY) -m bench $(NAME) $(ARGS)
bench-%: dev ## The same in short: make bench-serving
	@$(PY) -m bench $* $(ARGS)
exactness: dev ## Compare greedy output with transformers in every combination of settings
	@$(PY) -m bench exactness $(ARGS)
eval-eviction: dev ## Measure what token eviction costs in answers; ARGS="--help"
	@$(PY) -m bench eval-eviction $(ARGS)
peers: dev ## Install other engines to compare with, each in an environment of its own
	@$(PY) -m bench.peers.set_up $(ARGS)
pictures: dev ## Make the pictures of the console and of kvctl top for docs/ anew
	@$(PY) -m tests.pictures
capture: dev ## Record the session of the README with a running stack
	@$(PY) -m tests.capture

##@ Other

clean: ## Remove the environment and what the tools left; says what else there is, and how to uninstall
	@rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@kept=(); for folder in \
	  "$${KVKEEP_EXECUTOR_CACHE_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/kvkeep}" \
	  "$${KVKEEP_STATE_DIR:-$${XDG_STATE_HOME:-$$HOME/.local/state}/kvkeep}" \
	  "$${KVKEEP_EXECUTOR_HOST_CACHE_DIR:-/dev/shm/kvkeep}"; do [ ! -e "$$folder" ] || kept+=("$$folder"); done; \
	if (($${#kept[@]})); then \
	  echo 'Models, compiled code, cached blocks, state and logs are kept:'; du -sh "$${kept[@]}" | sed 's/^/  /'; \
	  printf 'To uninstall kvkeep, stop its processes, then\n  rm -rf'; printf ' %q' "$${kept[@]}"; \
	  printf '\nand remove this folder.\n'; \
	fi

ifeq ($(VENV),.venv)
base: python
	@$(SET_UP)
dev: python
	@$(SET_UP) --dev
tools: python
	@$(SET_UP) --dev --without-model
else
base dev tools:
	@[ -x $(PY) ] || { echo "VENV=$(VENV): no $(PY) there" >&2; exit 2; }
endif

python:
	@command -v $(PYTHON) > /dev/null || { echo "there is no $(PYTHON) on this machine" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	  echo "kvkeep needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1 | head -n 1 || true)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
