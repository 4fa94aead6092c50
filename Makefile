# make run   runs the whole pipeline on this machine, on embedded real images
# make test  runs the tests; a test that cannot run is skipped with the reason
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
RUN ?= digits
ARGS ?=
WORKERS ?= auto
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Bytecode is written even if the environment forbids it: else each process of the tests compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-slow test-examples test-drills test-gpu-paper test-oldest test-programs coverage mutation-check lint types check docs docs-serve reference bench bench-network bench-gpu bench-tpu chart dashboards drills fuzz images wheels dist release \
  clean lock lock-upgrade \
  cluster-up cluster-images cluster-test cluster-down cluster-clean

help: ## print this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: .venv/.run ## shard, train, evaluate and report on embedded real images (RUN=preset, ARGS="--set a.b=c")
	@$(BIN)/podscale run $(RUN) $(ARGS)

# Files keep the order of the directories: short unit tests come last, so that no worker ends with a long file.
# A lost worker fails the run, because pytest-xdist hangs if it replaces one (tests/support/lost_workers.py).
SUITE_OPTIONS := --dist loadfile --no-loadscope-reorder --max-worker-restart=0
SUITE = $(BIN)/python -m pytest -n $(WORKERS) $(SUITE_OPTIONS)

test: .venv/.dev ## run the tests in WORKERS processes, one file at a time (ARGS="-k name" to choose)
	@$(SUITE) $(ARGS)

test-slow: .venv/.dev ## run the slow tests: whole runs that are killed, starved or repeated, in seven minutes
	@PODSCALE_TEST_SLOW=1 $(SUITE) -m slow tests/system tests/jax tests/distributed tests/repository tests/unit/pytorch tests/unit/data $(ARGS)

test-examples: .venv/.dev ## run the commands of the tutorials and the small form of every benchmark, in three minutes
	@PODSCALE_TEST_EXAMPLES=1 $(SUITE) tests/system/test_tutorials.py tests/system/test_notebooks.py tests/repository/test_benchmarks.py $(ARGS)

test-drills: .venv/.dev ## run the drills as tests, with two workers for five minutes (see `make drills`); needs Prometheus and root
	@PODSCALE_TEST_DRILLS=1 $(SUITE) tests/system/drills $(ARGS)

test-gpu-paper: .venv/.dev ## run the training steps of every option on a GPU that exists on paper, and faults in GPU kernels, in 17 minutes; needs gcc, no GPU
	@PODSCALE_TEST_PAPER_GPU=1 $(SUITE) tests/paper_gpu $(ARGS)

test-oldest: .venv-oldest/.oldest ## run the unit tests and those of exports with the oldest supported packages, in .venv-oldest (PYTHON=python3.12 for that version)
	@.venv-oldest/bin/python -m pytest -n $(WORKERS) $(SUITE_OPTIONS) tests/system/export tests/system/train/test_avx2.py tests/unit $(ARGS)

test-programs: ## install Debian's packages of programs without which tests are skipped: needs root
	@tools/test_programs.sh

coverage: .venv/.dev ## run every test and report the lines that ran: slower, and without the lines of training ranks
	@$(SUITE) --cov --cov-report=term:skip-covered $(ARGS)

mutation-check: .venv/.dev ## change each formula of the optimizers and schedules once, and check that a test fails
	@$(BIN)/python -m tools.mutation_check $(ARGS)

lint: .venv/.dev ## check style (ruff; clippy and rustfmt if cargo has them), names and docstrings, and links between Markdown pages
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/python -m tools.prose_lint && $(BIN)/python -m tools.markdown_links
	@if cargo clippy --version >/dev/null 2>&1 && cargo fmt --version >/dev/null 2>&1; then \
	  cargo clippy --quiet --locked --release --manifest-path native/Cargo.toml -- -D warnings && \
	  cargo fmt --check --manifest-path native/Cargo.toml && cargo fmt --check --manifest-path native/fuzz/Cargo.toml; \
	else echo "native/ was not checked: cargo with clippy and rustfmt is not installed" >&2; fi

types: .venv/.dev ## check types with mypy
	@$(BIN)/mypy

check: lint types test ## run lint, types and tests, as continuous integration does

docs: .venv/.docs ## build the documentation site into site/ (REPOSITORY=https://... for links to its code)
	@$(BIN)/python -m tools.docs_site build $(if $(REPOSITORY),--repository $(REPOSITORY))

docs-serve: .venv/.docs ## show the site at http://localhost:8000, following changes of docs/
	@$(BIN)/python -m tools.docs_site serve $(if $(REPOSITORY),--repository $(REPOSITORY))

reference: .venv/.dev ## write docs/explanation/papers.md and the pages of docs/reference/ that are generated
	@$(BIN)/python -m tools.reference_pages
	@$(BIN)/python -m tools.papers_page

bench: .venv/.dev ## run the benchmarks, into benchmarks/results/ (five more with IMAGES=originals.tar, SHARD_SET=dir, and KWOK=kubeconfig of a cluster with kwok)
	@for name in telemetry reducer batchnorm optimizers jax_cpu pipeline; do OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name || exit 1; done
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.pipeline --engines pytorch jax
	@if [ -n "$(KWOK)" ]; then $(BIN)/python -m benchmarks.failures --kubeconfig "$(KWOK)"; fi
	@if [ -n "$(IMAGES)" ]; then $(BIN)/python -m benchmarks.shards --images "$(IMAGES)"; fi
	@if [ -n "$(SHARD_SET)" ]; then $(BIN)/python -m benchmarks.input $(SHARD_SET) && $(BIN)/python -m benchmarks.input_host $(SHARD_SET) && $(BIN)/python -m benchmarks.shared_cache $(SHARD_SET); fi

bench-network: .venv/.dev ## measure all-reduce and scaling over shaped links, about ten minutes; needs root (ARGS="ratios auto" to choose)
	@TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python -m benchmarks.network $(ARGS)

bench-gpu: ## run the GPU tests, then the sweep of `podscale bench train`; needs a GPU and PYTHON with torch (ARGS: further options of the sweep)
	@PYTHON="$(PYTHON)" tools/gpu_session.sh $(ARGS)

bench-tpu: ## compile training steps for TPU slices; needs PYTHON with jax[tpu] (ROWS="v3-1024 ..."; default: the missing rows)
	@"$(PYTHON)" -m benchmarks.tpu_compile $(ROWS)

chart: .venv/.run ## generate the chart's rules, its schema and the tables of its README
	@$(BIN)/python tools/monitoring_rules.py
	@$(BIN)/python tools/chart_values.py

dashboards: .venv/.dev ## generate the dashboards' JSON, and draw them from a real training into docs/images (ten minutes)
	@$(BIN)/python tools/dashboards.py && $(BIN)/python -m tests.dashboards.pictures

drills: .venv/.dev ## inject faults into a real training under a real Prometheus, into docs/how-to/drills.md; needs root (ARGS="--only killed")
	@$(BIN)/python -m tests.system.drills $(ARGS)

fuzz: .venv/.dev ## fuzz the native decoder for MINUTES (10), and compare what was found with Pillow; needs cargo
	@$(BIN)/python -m tests.support.native_fuzz --minutes $(or $(MINUTES),10)

images: ## build the container images with podman or docker (IMAGES="base tools" to choose; docs/how-to/images.md)
	@images/build.sh $(IMAGES)

dist: .venv/.dev ## build the wheel, the source distribution, the chart and the SBOM of this commit into dist/
	@$(BIN)/python -m tools.distribution

wheels: .venv/.dev .venv/.wheels ## build wheels with the native decoder for x86-64 and ARM into dist/; needs cargo (rustup target add aarch64-unknown-linux-gnu)
	@$(BIN)/python -m tools.native_wheels

release: .venv/.dev ## do the same, and refuse a commit that is not a release (docs/how-to/release.md)
	@$(BIN)/python -m tools.distribution --release

lock: ## update the requirement files, keeping versions that still fit
	@tools/lock.sh

lock-upgrade: ## update the requirement files to the newest versions
	@tools/lock.sh --upgrade

cluster-up: .venv/.dev ## start a real Kubernetes as processes on this machine, for tests; needs root and Go (FULL=1: all operators, WITH=jobset: only that one)
	@$(BIN)/python -m tests.cluster.lab up $(if $(FULL),--full) $(WITH)

cluster-images: .venv/.dev ## build podscale-base, -tools and -tpu (IMAGES to choose), and load them into that cluster
	@$(BIN)/python -m tests.cluster.lab images $(IMAGES)

cluster-test: .venv/.dev ## run tests/cluster on that cluster, or on the cluster of KUBECONFIG
	@PODSCALE_TEST_CLUSTER=1 $(BIN)/python -m pytest tests/cluster $(ARGS)

cluster-down: .venv/.dev ## stop that cluster and remove what it left on the machine, except programs and images
	@$(BIN)/python -m tests.cluster.lab down

cluster-clean: .venv/.dev ## remove those too, including podman's images; Go's caches are only listed
	@$(BIN)/python -m tests.cluster.lab clean

clean: ## remove the environments, the native extension, the caches and the output of `make run`
	rm -rf .venv .venv-oldest build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* runs datasets
	rm -rf native/target podscale/data/_native*.so

# The environment is installed from hash-pinned files only. A stamp that is older than its requirement file triggers the
# installation, so a second `make` takes no time. So does a change of the extension, which is built if cargo is there.
NATIVE := native/Cargo.toml native/Cargo.lock $(wildcard native/src/*.rs native/src/*/*.rs)
.venv/bin/python .venv-oldest/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "podscale needs Python 3.11 or later. Choose one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "creating $* with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $*

.venv/.run: requirements/run.txt requirements/build.txt pyproject.toml setup.py $(NATIVE) | .venv/bin/python
	@tools/install.sh run

.venv/.dev: requirements/dev.txt requirements/build.txt pyproject.toml setup.py $(NATIVE) | .venv/bin/python
	@tools/install.sh dev

.venv/.docs: requirements/docs.txt requirements/build.txt pyproject.toml setup.py $(NATIVE) | .venv/bin/python
	@tools/install.sh docs

.venv/.wheels: requirements/wheels.txt | .venv/.dev
	@tools/install.sh wheels

.venv-oldest/.oldest: requirements/oldest.txt requirements/build.txt pyproject.toml setup.py $(NATIVE) | .venv-oldest/bin/python
	@tools/install.sh oldest
