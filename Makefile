# Everything there is to do here; `make help` lists it.
#
#   make run-local MODEL=<folder or hub id> DEVICE=auto|cpu|cuda PREFILL=1 DECODE=1 PORT=50051 ARGS="--max-context 2048"
#   make run-local PREFILL=0 DECODE=2    (no split: each decode worker prefills too)
#   make test-unit TESTS="tests/unit/test_core.py -k lengths"
#   make bench-cpu ARGS="--help"
#   make bench-serve ARGS="goodput --launch --slo ttft:p90:400ms --slo gap:p99:12ms"
#
# Targets run in .venv, which is made on demand. PYTHON=python3 runs them with that interpreter instead and installs nothing.

# pip's requirement (and options) for torch. torch==2.13.0 is what is tested.
TORCH ?= torch==2.13.0
MODEL ?=
DEVICE ?= auto
PREFILL ?= 1
DECODE ?= 1
PORT ?= 50051
ARGS ?=
TESTS ?=
ONLY ?=

ifeq ($(origin PYTHON),undefined)
  PYTHON := .venv/bin/python
  IN_VENV := yes
  # Keyed by content, not by time: a fresh checkout of the same state finds its environment ready.
  READY := .venv/.ready-$(shell { cat pyproject.toml requirements.lock; echo '$(TORCH)'; } | sha256sum | cut -c1-16)
endif

# One word of the shell's, whatever is in it.
quoted = '$(subst ','\'',$(1))'

.DEFAULT_GOAL := help
.PHONY: setup protos run-local smoke chat top test test-unit test-faults test-faults-long test-gpu bench bench-cpu bench-router bench-gpu bench-serve bench-faults bench-sim soak fmt lint types clean help

setup: $(READY)  ## make .venv and install the pinned dependencies (TORCH= chooses another torch)

ifdef IN_VENV
$(READY):
	@sh deploy/make_venv.sh '$(TORCH)' '$@'
endif

protos: $(READY)  ## generate common/rpc/gen from protos/
	@$(PYTHON) protos/generate.py

run-local: $(READY) $(if $(IN_VENV),protos)  ## start router, prefill and decode workers here; Ctrl-C stops them
	@$(PYTHON) -m deploy.run_local --model $(call quoted,$(MODEL)) --device $(call quoted,$(DEVICE)) --prefill $(call quoted,$(PREFILL)) --decode $(call quoted,$(DECODE)) --port $(call quoted,$(PORT)) $(ARGS)

smoke: $(READY)  ## try a running cluster (or one started for it) with grpcurl
	@$(PYTHON) -m deploy.smoke --port $(call quoted,$(PORT)) $(if $(IN_VENV),--install) $(ARGS)

chat: $(READY)  ## talk to a running cluster in the terminal
	@$(PYTHON) -m examples.chat --router $(call quoted,127.0.0.1:$(PORT)) $(ARGS)

top: $(READY)  ## watch a running cluster in the terminal
	@$(PYTHON) -m deploy.top --router $(call quoted,127.0.0.1:$(PORT)) $(ARGS)

test: $(READY)  ## everything CI runs: lint, types, protos, unit, contract, cluster and (short) fault tests
	@$(PYTHON) -m tests

test-unit: $(READY)  ## the quick tests
	@$(PYTHON) -m pytest $(or $(TESTS),tests/unit tests/contract) $(ARGS)

test-faults: $(READY)  ## kill, pause and cut things
	@$(PYTHON) -m pytest $(or $(TESTS),tests/faults) $(ARGS)

test-faults-long: $(READY)  ## the same with the cases' waits at full length
	@$(PYTHON) -m pytest --long $(or $(TESTS),tests/faults) $(ARGS)

test-gpu: $(READY)  ## what needs a GPU; says why it skips without one
	@$(PYTHON) -m pytest -rs $(or $(TESTS),tests/gpu) $(ARGS) || [ $$? -eq 5 ]

bench: bench-cpu bench-router  ## all benchmarks

bench-cpu: $(READY)  ## generation on this machine's CPU, next to transformers
	@$(PYTHON) -m bench.cpu $(ARGS)

bench-router: $(READY)  ## the router's own speed, with workers that only pretend
	@$(PYTHON) -m bench.router $(ARGS)

bench-serve: $(READY)  ## what clients see under load: ARGS="open|goodput|offline|interference ..."
	@$(PYTHON) -m bench.serve $(or $(ARGS),--help)

bench-faults: $(READY)  ## what a killed worker or router costs, a table (ARGS="--only 2p2d-decode")
	@$(PYTHON) -m bench.faults $(ARGS)

bench-gpu: $(READY)  ## the GPU data plane, a table per line of docs/performance.md (ONLY=1,4 chooses)
	@$(PYTHON) -m bench.gpu $(if $(ONLY),--only '$(ONLY)') $(ARGS)

bench-sim: $(READY)  ## placement policies on a simulated fleet of 64 + 64 workers (docs/simulator.md)
	@$(PYTHON) -m bench.sim $(ARGS)

soak: $(READY)  ## 20,000 requests through a simulated fleet that is being hurt
	@$(PYTHON) -m bench.soak $(ARGS)

fmt: $(READY)  ## format the code
	@$(PYTHON) -m ruff format
	@$(PYTHON) -m ruff check --fix

lint: $(READY)  ## ruff and buf
	@$(PYTHON) -m tests lint

types: $(READY)  ## mypy --strict
	@$(PYTHON) -m tests types

clean:  ## remove what was generated, .venv and .models included
	rm -rf .venv .models .cache .run bench/out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  %-16s %s\n", $$1, $$2}' Makefile
