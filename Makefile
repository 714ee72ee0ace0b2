# Variables of the command line, for example: make reproduce-figure-4 PROFILE=smoke SEEDS="1 2"
PROFILE ?= laptop
SEEDS ?=
PYTHON ?=
DATA_ROOT ?=
FRESH ?=
ARGS ?=
# Processes that share the tests; many tests start two to four processes of their own.
TEST_WORKERS ?= 2

VENV := .venv
STAMP := $(VENV)/installed
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest -n $(TEST_WORKERS) --dist worksteal
export PYTHON
# Each worker has one intra-op thread, since several workers share the cores.
export OMP_NUM_THREADS ?= 1
ifneq ($(DATA_ROOT),)
export ONEBIT_DATA_ROOT := $(abspath $(DATA_ROOT))
endif

# The file of a figure or table: figure-4 -> figure_04, figure-zero-one-adam -> figure_zero_one_adam
module = $(shell echo $(1) | tr - _ | sed -E 's/_([0-9])$$/_0\1/')
seeds = $(if $(SEEDS),--seeds $(SEEDS))
draw = $(RUN) experiments/$(1).py --profile $(PROFILE)

# What can stand for N in the targets below. A wrong N is an error before anything is set up.
names = $(subst _,-,$(subst _0,-,$(basename $(notdir $(wildcard experiments/$(1)_*.py)))))
drawn := $(call names,figure) $(call names,sweep) $(call names,table)
measured := kernel-speed step-cost overlap linear-speedup error-feedback network beside-deepspeed
goals := $(patsubst plan-%,%,$(patsubst reproduce-%,%,$(MAKECMDGOALS)))
wrong := $(filter-out $(drawn),$(filter figure-% sweep-% table-%,$(goals)))
$(if $(wrong),$(error there is no $(wrong): there are $(drawn)))
wrong := $(filter-out $(measured),$(patsubst measure-%,%,$(filter measure-%,$(goals))))
$(if $(wrong),$(error there is no measurement $(wrong): there are $(measured:%=measure-%)))

.DEFAULT_GOAL := help
.PHONY: help setup test test-all reproduce claims kernel-speed step-cost overlap linear-speedup error-feedback beside-deepspeed notebooks deepspeed docs reports lint lock clean FORCE

help: ## List the targets
	@sed -n 's/^\([a-z%-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | sed 's/%/N/' | awk -F '\t' '{ printf "  make %-22s %s\n", $$1, $$2 }'
	@echo 'Figures N:  $(patsubst figure-%,%,$(call names,figure))'
	@echo 'Tables N:   $(patsubst table-%,%,$(call names,table))'
	@echo 'Sweeps N:   $(patsubst sweep-%,%,$(call names,sweep))'
	@echo 'Measure N:  $(measured)'
	@echo 'Variables:  PROFILE=laptop|smoke|workstation|paper  SEEDS="1 2"  DATA_ROOT=DIR  FRESH=1  PYTHON=/path/to/python3.11  ARGS="pytest options"  TEST_WORKERS=2'

setup: $(STAMP) ## Make .venv with the pinned packages (Python 3.11+; 6.5 GB, a few minutes the first time)

$(STAMP): requirements.lock pyproject.toml scripts/make_venv
	@scripts/make_venv $(VENV)
	@touch $@

test: lint ## Check the style and the types, then run the tests
	$(PYTEST) $(ARGS)

test-all: setup ## Run the tests that repeat a law at more sizes, which `make test` leaves out
	$(PYTEST) -m more $(ARGS)

reproduce: setup ## The main job: train one new seed of every optimizer, and judge it beside the committed seeds (FRESH=1: again)
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

sweep-%: setup FORCE ## Redraw sweep N from the committed CSV, in seconds
	$(call draw,$(call module,sweep-$*))

reproduce-sweep-%: setup FORCE ## Train what sweep N lacks (PROFILE, SEEDS), then draw it
	$(RUN) -m onebit.lab.reproduce $(call module,sweep-$*) --profile $(PROFILE) $(seeds) $(if $(FRESH),--fresh)

plan-sweep-%: setup FORCE ## Print what sweep N trains at PROFILE
	$(RUN) -m onebit.lab.plan $(call module,sweep-$*) --profile $(PROFILE)

claims: setup ## Judge every claim from the committed CSV, into results/CLAIMS.md and the table in README.md
	$(RUN) -m onebit.lab.claims.judge
	$(RUN) -m onebit.lab.claims.by_model

kernel-speed: setup ## Redraw the kernels' speed beside the memory's bandwidth, and judge its rules
	$(RUN) experiments/kernel_speed.py

step-cost: setup ## Redraw the cost of an optimizer step beside all_reduce and fused Adam, and judge its rules
	$(RUN) experiments/step_cost.py

overlap: setup ## Redraw how much of the exchange backward hides on slow links
	$(RUN) experiments/overlap.py

linear-speedup: setup ## Redraw how the error falls with the number of workers, and the exponents beside Corollary 1
	$(RUN) experiments/linear_speedup.py

error-feedback: setup ## Redraw what error feedback keeps, and what forgetting the errors costs
	$(RUN) experiments/error_feedback.py

beside-deepspeed: setup ## Redraw DeepSpeed 0.19.6's three optimizers beside onebit's (measure-beside-deepspeed ARGS=--times: the times)
	$(RUN) experiments/beside_deepspeed.py

deepspeed: setup ## Install DeepSpeed into .deepspeed/ for its tests and its comparison
	$(RUN) scripts/install_deepspeed.py

measure-%: setup FORCE ## Measure N again (1 to 15 minutes, during which the machine should be idle)
	$(RUN) experiments/$(subst -,_,$*).py --measure $(ARGS)

notebooks: setup ## Run the notebooks on the committed results, into results/live/notebooks/*.html
	@for notebook in notebooks/*.ipynb; do echo "Running $$notebook, about 15 seconds"; \
	    $(RUN) -m nbconvert --log-level WARN --execute --to html --output-dir results/live/notebooks "$$notebook" || exit 1; done
	@echo "Written: $$(ls results/live/notebooks/*.html | tr '\n' ' ')"

docs: setup ## Build the documentation, with an API reference, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "The site is in site/: open site/index.html"

reports: setup ## Print each public report of a fault beside the tests that keep it from returning
	$(RUN) scripts/reports.py

lint: setup ## Check style and format with ruff, and the types of the public API with mypy
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

lock: ## Resolve requirements.lock again after a change of pyproject.toml (needs uv)
	uv pip compile --universal --python-version 3.11 --extra fast --extra lab --extra mpi --extra dev --extra docs pyproject.toml -o requirements.lock

clean: ## Remove .venv, caches and live runs; committed results stay
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache results/live outputs multirun wandb
	find src tests experiments -name __pycache__ -prune -exec rm -rf {} +
