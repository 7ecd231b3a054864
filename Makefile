# Each target brings .venv up to date by itself: `make demo` on a fresh machine is enough.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SOURCES := .pkg/forebay tests scripts

# Thousands of processes start in tests: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo chaos test test-nightly simulate check dist bench docs format protos constraints clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(READY) ## make .venv with everything in it

$(READY): pyproject.toml deploy/tools/pyproject.toml constraints.txt scripts/setup
	@PYTHON=$(PYTHON) scripts/setup
	@touch $@

demo: $(READY) ## train on real data while the dispatcher is killed, and resume a read exactly
	$(BIN)/python examples/demo

chaos: $(READY) ## kill everything at random, and check the promises; ARGS="--minutes 10"
	$(BIN)/forebay chaos $(ARGS)

test: $(READY) ## run the tests but the long ones; ARGS="-k name" chooses among them
	@scripts/redis
	@scripts/postgres
	@scripts/pytest -m "not long" $(ARGS)

test-nightly: $(READY) ## run all tests, also those of tests, tools, examples, other frameworks and versions; then chaos
	@scripts/tool kubernetes-client kubectl kustomize deploy/kubernetes/gke # 1.32 can, 1.20 can't
	@scripts/tool haproxy haproxy -v
	@scripts/tool systemd systemd-analyze --version
	@scripts/redis
	@scripts/postgres
	@scripts/tool prometheus promtool --version
	@scripts/tool chromium chromium --version
	@PYTHON=$(abspath $(BIN))/python scripts/frameworks
	@PYTHON=$(abspath $(BIN))/python scripts/environment tf-2.16 tf-2.18 tf-2.21
	@scripts/pytest --durations 30 --hypothesis-profile long $(ARGS)
	$(BIN)/forebay chaos --seed 1 --minutes 2
	$(BIN)/forebay chaos --seed 1 --minutes 1 --storage postgres --tls
	@date -u +"%F: passed at $$(git rev-parse HEAD)" >tests/nightly.txt

simulate: $(READY) ## run 10,000 seeds of the simulation; ARGS="--seed 7 --trace" replays one
	$(BIN)/python -m tests.simulation $(or $(ARGS),--seeds 10000)

check: $(READY) ## lint, types, import direction, generated files, the built wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/python scripts/protos.py --check
	$(BIN)/python scripts/decisions.py --check
	$(BIN)/pytest -q tests/test_house.py
	$(BIN)/python scripts/check_wheel.py

dist: $(READY) ## build the wheels and the source distributions into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist deploy/tools

bench: $(READY) ## measure, side by side with tf.data service; ARGS="scalars --rounds 3"
	$(BIN)/forebay bench --json benchmarks/results/$$(date -u +%Y-%m-%d-%H%M).json $(ARGS)

docs: $(READY) ## make a site of the documentation, in build/site; warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -j auto -c docs . build/site

format: $(READY) ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(READY) ## generate the protobuf modules from the .proto files
	$(BIN)/python scripts/protos.py

constraints: ## renew constraints.txt with the newest versions that pyproject.toml allows
	@PYTHON=$(PYTHON) scripts/constraints

clean: ## remove all that make made
	rm -rf .venv .pkg .frameworks* .environments build dist *.egg-info deploy/tools/build deploy/tools/*.egg-info .*_cache .hypothesis
