# Every target does its own set-up: a fresh Debian machine with Python 3.11, git and make is enough.
PYTHON ?= python3
export PYTHON
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench soak gvisor images clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: ## run a real goal on a real data file, end to end; RESUME=run goes on with one that was interrupted
	@.ci/setup.sh toolserver,agent,sandbox
	@$(BIN)/python examples/weather/demo.py $(if $(RESUME),--resume $(RESUME))

test: lint ## set up everything, then lint and run the whole suite
	@.ci/engine.sh docker-compose
	@.ci/engine.sh chromium-headless-shell || echo "Chromium can't be installed here: its tests under bubblewrap are skipped" >&2
	@.ci/engine.sh runsc || echo "gVisor can't be installed here: its tests are skipped" >&2
	@$(BIN)/python -m tests.integration.mcp_clients.installs & clients=$$!; $(BIN)/toolserver images build --all && wait $$clients
	@.ci/tests.sh

lint: ## format, lint, types, import rules
	@.ci/setup.sh dev
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

images: ## make sure of a Docker engine and build the tool images
	@.ci/setup.sh dev
	@.ci/engine.sh
	@$(BIN)/toolserver images build

bench: images ## benchmarks, as ratios to the floor in the same run; RIVALS=1 beside other sandboxes, ARGS=--help
	@$(BIN)/python benchmarks/run.py $(if $(RIVALS),--rivals all) $(ARGS)

soak: images ## ten minutes with 50 sessions; SOAK="--minutes 60 --kills --runtime bubblewrap" for another one
	@$(BIN)/python -m tests.soak $(SOAK)

gvisor: images ## hostile code and the sandboxes' contract on gVisor, in an engine of its own: ten minutes, as root
	@.ci/engine.sh runsc
	@TOOLCRIB_TEST_GVISOR=1 $(BIN)/python -m pytest -k gvisor tests/abuse tests/conformance tests/integration/engine tests/faults $(ARGS)

clean: ## remove what the targets made in this folder
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
