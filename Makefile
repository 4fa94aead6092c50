# make run   the whole pipeline on this machine, on embedded real images
# make test  every test; each one runs or says why it cannot
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
RUN ?= digits
ARGS ?=
WORKERS ?= auto
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help run test test-programs coverage lint types check docs docs-serve reference bench bench-network bench-gpu bench-tpu chart dashboards drills images \
  clean lock lock-upgrade \
  cluster-up cluster-images cluster-test cluster-down cluster-clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: .venv/.run ## shard, train, evaluate and report on embedded real images (RUN=preset, ARGS="--set a.b=c")
	@$(BIN)/podscale run $(RUN) $(ARGS)

# In the order of the directories: files of short unit tests come last, so that no process is left with a long one.
# A lost worker ends the run: pytest-xdist hangs if it replaces one (tests/support/lost_workers.py).
SUITE = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

test: .venv/.dev ## every test, a file at a time in WORKERS processes (ARGS="-k name" to choose)
	@$(SUITE) $(ARGS)

test-programs: ## install Debian's packages of programs without which tests are skipped: needs root
	@tools/test_programs.sh

coverage: .venv/.dev ## the same, and which lines ran: slower, and blind for ranks, which end without a word to coverage
	@$(SUITE) --cov --cov-report=term:skip-covered $(ARGS)

lint: .venv/.dev ## ruff: style and common mistakes; links between Markdown pages
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/python -m tools.markdown_links

types: .venv/.dev ## mypy: types
	@$(BIN)/mypy

check: lint types test ## what continuous integration runs

docs: .venv/.docs ## build the documentation site into site/ (REPOSITORY=https://... for links to its code)
	@$(BIN)/python -m tools.docs_site build $(if $(REPOSITORY),--repository $(REPOSITORY))

docs-serve: .venv/.docs ## show the site at http://localhost:8000, following changes of docs/
	@$(BIN)/python -m tools.docs_site serve $(if $(REPOSITORY),--repository $(REPOSITORY))

reference: .venv/.dev ## write the pages of docs/reference/ that come from the code
	@$(BIN)/python -m tools.reference_pages

bench: .venv/.dev ## benchmarks into benchmarks/results/ (three more with IMAGES=originals.tar and SHARD_SET=dir)
	@for name in telemetry reducer batchnorm optimizers jax_cpu pipeline; do OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name || exit 1; done
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.pipeline --engines pytorch jax
	@if [ -n "$(IMAGES)" ]; then $(BIN)/python -m benchmarks.shards --images "$(IMAGES)"; fi
	@if [ -n "$(SHARD_SET)" ]; then $(BIN)/python -m benchmarks.input $(SHARD_SET) && $(BIN)/python -m benchmarks.input_host $(SHARD_SET); fi

bench-network: .venv/.dev ## all-reduce and scaling over shaped links, about ten minutes; needs root (ARGS="ratios auto" to choose)
	@TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python -m benchmarks.network $(ARGS)

bench-gpu: ## on a machine with a GPU and PYTHON with torch: its tests, then the sweep of `podscale bench train`
	@PYTHON="$(PYTHON)" tools/gpu_session.sh

bench-tpu: ## steps compiled for TPU slices, with PYTHON of an environment that has jax[tpu] (ROWS="v3-1024 ..."; without: what is missing)
	@"$(PYTHON)" -m benchmarks.tpu_compile $(ROWS)

chart: .venv/.run ## write the chart's rules, its schema and the table of its README from their sources
	@$(BIN)/python tools/monitoring_rules.py
	@$(BIN)/python tools/chart_values.py

dashboards: .venv/.dev ## write the dashboards' JSON, and draw them of a real training into docs/images (ten minutes)
	@$(BIN)/python tools/dashboards.py && $(BIN)/python -m tests.dashboards.pictures

drills: .venv/.dev ## put faults into a real training under a real Prometheus, into docs/how-to/drills.md: needs root (ARGS="--only killed")
	@$(BIN)/python -m tests.system.drills $(ARGS)

images: ## build the container images with podman or docker (IMAGES="base tools" to choose; docs/how-to/images.md)
	@images/build.sh $(IMAGES)

lock: ## resolve the requirement files again, keeping versions that still fit
	@tools/lock.sh

lock-upgrade: ## resolve the requirement files to the newest versions
	@tools/lock.sh --upgrade

cluster-up: .venv/.dev ## a real Kubernetes out of processes of this machine, for tests: needs root and Go (FULL=1: all operators, WITH=jobset: that one)
	@$(BIN)/python -m tests.cluster.lab up $(if $(FULL),--full) $(WITH)

cluster-images: .venv/.dev ## build podscale-base, -tools and -tpu (IMAGES: some of them), and bring them into that cluster
	@$(BIN)/python -m tests.cluster.lab images $(IMAGES)

cluster-test: .venv/.dev ## the tests of tests/cluster, on that cluster or the one that KUBECONFIG names
	@PODSCALE_TEST_CLUSTER=1 $(BIN)/python -m pytest tests/cluster $(ARGS)

cluster-down: .venv/.dev ## end that cluster and all that it left on the machine, but for programs and images
	@$(BIN)/python -m tests.cluster.lab down

cluster-clean: .venv/.dev ## remove those too, podman's among them; Go's caches it lists
	@$(BIN)/python -m tests.cluster.lab clean

clean: ## remove the environment, caches and what `make run` wrote
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* runs datasets

# The environment is made from hash-pinned files alone. A stamp is older than its requirement file exactly when
# something is to be done, so a second `make` takes no time.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "podscale needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

.venv/.run: requirements/run.txt requirements/build.txt pyproject.toml setup.py | .venv/bin/python
	@tools/install.sh run

.venv/.dev: requirements/dev.txt requirements/build.txt pyproject.toml setup.py | .venv/bin/python
	@tools/install.sh dev

.venv/.docs: requirements/docs.txt requirements/build.txt pyproject.toml setup.py | .venv/bin/python
	@tools/install.sh docs
