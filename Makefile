# Variables for the command line, e.g. make reproduce-figure-4 PROFILE=smoke SEEDS="1 2"
PROFILE ?= laptop
SEEDS ?=
PYTHON ?=
DATA_ROOT ?=
FRESH ?=
ARGS ?=

VENV := .venv
STAMP := $(VENV)/installed
RUN := $(VENV)/bin/python
export PYTHON
# One intra-op thread a worker: several workers share the cores.
export OMP_NUM_THREADS ?= 1
ifneq ($(DATA_ROOT),)
export ONEBIT_DATA_ROOT := $(abspath $(DATA_ROOT))
endif

# The file of a figure or table: figure-4 -> figure_04, figure-zero-one-adam -> figure_zero_one_adam
module = $(shell echo $(1) | tr - _ | sed -E 's/_([0-9])$$/_0\1/')
seeds = $(if $(SEEDS),--seeds $(SEEDS))
there = $(basename $(notdir $(wildcard experiments/figure_*.py experiments/sweep_*.py experiments/table_*.py)))
draw = $(if $(filter $(1),$(there)),$(RUN) experiments/$(1).py --profile $(PROFILE),$(error there is no $(1): there are $(subst _,-,$(subst _0,-,$(there)))))

.DEFAULT_GOAL := help
.PHONY: help setup test test-all reproduce claims kernel-speed step-cost overlap linear-speedup error-feedback notebooks docs lint lock clean FORCE

help: ## List the targets
	@sed -n 's/^\([a-z%-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | sed 's/%/N/' | awk -F '\t' '{ printf "  make %-22s %s\n", $$1, $$2 }'
	@echo 'Variables: PROFILE=laptop|smoke|paper  SEEDS="1 2"  DATA_ROOT=DIR  FRESH=1  PYTHON=/path/to/python3.11  ARGS="pytest options"'

setup: $(STAMP) ## Make .venv with the pinned packages (Python 3.11+; 6.5 GB, a few minutes the first time)

$(STAMP): requirements.lock pyproject.toml scripts/make_venv
	@echo "Setting up $(VENV) from requirements.lock, a few minutes the first time"
	@scripts/make_venv $(VENV)
	@touch $@

test: lint ## Check the style and the types, then run the tests
	$(RUN) -m pytest $(ARGS)

test-all: setup ## Run the cases that repeat at more sizes what make test has proved
	$(RUN) -m pytest -m more $(ARGS)

reproduce: setup ## The main job: one live seed of every optimizer, judged against the committed seeds, with figures and table (FRESH=1: anew)
	$(RUN) -m onebit.lab.reproduce figure_04 figure_01 figure_02 --profile $(PROFILE) --live $(seeds) $(if $(FRESH),--fresh)

figure-%: setup FORCE ## Redraw figure N from the committed CSV, in seconds
	$(call draw,$(call module,figure-$*))

reproduce-figure-%: setup FORCE ## Train what figure N lacks (PROFILE, SEEDS), then draw it
	$(RUN) -m onebit.lab.reproduce $(call module,figure-$*) --profile $(PROFILE) $(seeds) $(if $(FRESH),--fresh)

plan-figure-%: setup FORCE ## Print what figure N trains at PROFILE: model, data, steps, time, launch commands
	$(RUN) -m onebit.lab.plan $(call module,figure-$*) --profile $(PROFILE)

table-%: setup FORCE ## Write table N from the committed CSV, in seconds
	$(call draw,$(call module,table-$*))

reproduce-table-%: setup FORCE ## Train what table N lacks (PROFILE, SEEDS), then write it
	$(RUN) -m onebit.lab.reproduce $(call module,table-$*) --profile $(PROFILE) $(seeds) $(if $(FRESH),--fresh)

plan-table-%: setup FORCE ## Print what table N trains at PROFILE, as plan-figure-N
	$(RUN) -m onebit.lab.plan $(call module,table-$*) --profile $(PROFILE)

sweep-%: setup FORCE ## Redraw a sweep from the committed CSV: N = warmup, compressor or mask
	$(call draw,$(call module,sweep-$*))

reproduce-sweep-%: setup FORCE ## Train what sweep N lacks (PROFILE, SEEDS), then draw it
	$(RUN) -m onebit.lab.reproduce $(call module,sweep-$*) --profile $(PROFILE) $(seeds) $(if $(FRESH),--fresh)

plan-sweep-%: setup FORCE ## Print what sweep N trains at PROFILE
	$(RUN) -m onebit.lab.plan $(call module,sweep-$*) --profile $(PROFILE)

claims: setup ## Judge every claim from the committed CSV: results/CLAIMS.md and the table in README.md
	$(RUN) -m onebit.lab.claims.judge

kernel-speed: setup ## Redraw the kernels' speed against the memory's bandwidth from the committed CSV, and the table of its bars
	$(RUN) experiments/kernel_speed.py

step-cost: setup ## Redraw what a whole optimizer step costs against all_reduce and fused Adam, and the table of its bars
	$(RUN) experiments/step_cost.py

overlap: setup ## Redraw how much of the exchange backward hides on slow links
	$(RUN) experiments/overlap.py

linear-speedup: setup ## Redraw how the error falls with the workers, and the table of exponents against Corollary 1
	$(RUN) experiments/linear_speedup.py

error-feedback: setup ## Redraw what error feedback keeps, what Adam's variance takes in, and what forgetting the errors costs
	$(RUN) experiments/error_feedback.py

measure-%: setup FORCE ## Measure N = kernel-speed, step-cost, overlap, linear-speedup or error-feedback anew (1 to 15 minutes; leave the machine alone)
	$(RUN) experiments/$(subst -,_,$*).py --measure $(ARGS)

notebooks: setup ## Run the notebooks on the committed results, into results/live/notebooks/*.html
	$(RUN) -m nbconvert --log-level WARN --execute --to html --output-dir results/live/notebooks notebooks/*.ipynb

docs: setup ## Build the documentation, with an API reference, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "The site is in site/: open site/index.html"

lint: setup ## Check style and format with ruff, and the types of the public API with mypy
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

lock: ## Resolve requirements.lock anew after a change of pyproject.toml (needs uv)
	uv pip compile --universal --python-version 3.11 --extra fast --extra lab --extra mpi --extra dev --extra docs pyproject.toml -o requirements.lock

clean: ## Remove .venv, caches and live runs; committed results stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache results/live outputs multirun wandb
	find src tests experiments -name __pycache__ -prune -exec rm -rf {} +
