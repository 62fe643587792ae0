# Everything runs in .venv, made from uv.lock. `make quickstart` and `make test` need nothing but Python >= 3.11, make and a package index.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := .venv/bin/
WORKERS := -n 3 --dist worksteal
export UV_PROJECT_ENVIRONMENT := .venv

.PHONY: help setup wheel quickstart sites test test-fast test-full test-oldest test-gpu test-engines engines check format bench guide-pictures browser test-browser watch-pictures readme-picture clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: .venv/.ready ## Make the locked environment

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv

.venv/.ready: pyproject.toml uv.lock $(if $(findstring .uv/,$(UV)),.uv/bin/uv)
	$(UV) sync --locked --extra tensorboard --extra parquet --compile-bytecode
	$(RUN)python -m compileall -q megalith
	@touch $@

quickstart: setup ## Prepare real text, train a small Llama on 4 CPU ranks, generate text, write a report
	$(RUN)megalith quickstart

sites: setup ## Train two sites over a wire of 10 Mbit/s and 100 ms between two namespaces (as root; else a relay on loopback): minutes
	$(RUN)megalith data prepare bundled:austen --tokenizer bytes --validation 0.03 --out data/austen-bytes
	$(RUN)python benchmarks/link.py --data data/austen-bytes

test: setup ## Run all tests but those of real engines and browsers
	$(RUN)pytest $(WORKERS) -m "not engines and not browser"

test-engines: setup ## Run those: machines as network namespaces or behind agents, Slurm, Ray (minutes; make engines installs what they need)
	$(RUN)pytest -m engines -rs

test-fast: setup ## Run the tests of an inner loop (two minutes on two cores)
	$(RUN)pytest $(WORKERS) -m "not slow and not engines and not browser" --ignore tests/promises --ignore tests/findings --ignore tests/gpu

test-full: setup ## Prove all pairs of choices, also in 8 and 4 bits, dry-run large recipes in full, hurt runs for an hour (hours on a small machine)
	MEGALITH_FULL=1 $(RUN)pytest $(WORKERS) $$(grep -rl --include='test_*.py' 'from tests.full import' tests)

engines: setup ## Install the engines that tests can run for real: Ray in .ray; Slurm and iproute2 (for machines as namespaces) from Debian, as root
	$(UV) venv --quiet --allow-existing --python .venv/bin/python .ray && $(UV) pip install --quiet --python .ray/bin/python ray
	apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2

test-browser: setup ## Open the pages in a real browser (make browser installs it)
	$(RUN)pytest -m browser -rs

browser: ## Install the browser that tests and pictures of the live page need: Chromium from Debian, as root
	apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core

test-oldest: setup ## Run all tests with the oldest PyTorch that is supported, in .oldest (3 GB more to download)
	$(UV) venv --quiet --allow-existing --python .venv/bin/python .oldest
	$(UV) pip install --quiet --compile-bytecode --python .oldest/bin/python --editable '.[tensorboard,parquet]' --group dev 'torch==2.11.*'
	.oldest/bin/pytest $(WORKERS) -m "not engines and not browser"

test-gpu: ## Run the tests that one GPU can run, in the environment at hand
	python3 -m pytest tests/gpu

check: setup ## Format, lint, types
	$(RUN)ruff format --check .
	$(RUN)ruff check .
	$(RUN)pyright

format: setup ## Format the code
	$(RUN)ruff format .
	$(RUN)ruff check --fix .

wheel: setup ## Build dist/megalith-*.whl, which pip installs anywhere
	$(RUN)python -m hatchling build -t wheel -d dist

bench: setup ## Measure training speed beside plain Hugging Face transformers
	$(RUN)python benchmarks/train_speed.py --peer

guide-pictures: setup ## Draw the pictures of docs/guide/parallelism.md and precision.md again
	$(RUN)python -m megalith.report.guide

watch-pictures: setup ## Take the pictures of docs/guide/watching.md again (make browser installs what it needs)
	$(RUN)python -m tests.watch.pictures

readme-picture: setup ## Take the picture of README.md again (make browser installs what it needs)
	$(RUN)python -m tests.report.pictures

clean: ## Remove what was made, but runs and data
	rm -rf .venv .uv .ray .oldest .pytest_cache .ruff_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
