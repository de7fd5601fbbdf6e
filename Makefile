# Every target installs first; `make` lists them.
VENV    := .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
NPROC   ?= 1
PRESET  ?= none
ARGS    ?=

# torchrun starts the processes that are asked for on CPUs as well as on GPUs; HF_DIST_NPROC lets a run
# notice a launcher that did not.
LAUNCH  = HF_DIST_NPROC=$(NPROC) $(BIN)/$(if $(filter 1,$(NPROC)),python,torchrun --standalone --nproc_per_node $(NPROC))
SCRIPTS := $(filter-out recipes/__init__.py,$(wildcard recipes/*.py))
RECIPES := $(subst _,-,$(basename $(notdir $(SCRIPTS))))

.DEFAULT_GOAL := help
.PHONY: help rooms install system-deps test test-all check bench clean $(RECIPES)

help:  ## List the targets
	@echo "hf_dist: make TARGET [NPROC=2] [PRESET=zero2] [ARGS=\"--max_steps 50\"]"
	@awk -F ':.*## ' '/^[a-z][a-z_-]*:.*## / {printf "  %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@awk 'FNR == 1 {name = FILENAME; gsub(/recipes\/|\.py/, "", name); gsub(/_/, "-", name); \
	  gsub(/"""/, ""); printf "  %-22s %s\n", name, $$0}' $(SCRIPTS)

rooms:  ## Say what each folder of hf_dist/ is for
	@awk 'FNR == 1 {name = FILENAME; sub(/\/__init__\.py/, "", name); gsub(/"""/, ""); \
	  printf "%-36s %s\n", name, $$0}' $$(find hf_dist -mindepth 2 -name __init__.py | sort)

$(STAMP): setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,deepspeed]'
	touch $(STAMP)

install: $(STAMP)  ## Make .venv with hf_dist and the tested versions in it

system-deps:  ## Install the optional system packages (libaio, for the zero3_nvme preset; needs root)
	apt-get update -qq && apt-get install -y -qq libaio-dev

$(RECIPES): $(STAMP)
	$(LAUNCH) recipes/$(subst -,_,$@).py --preset $(PRESET) $(ARGS)

test: $(STAMP)  ## Run the tests, without the slow ones
	$(BIN)/python -m pytest $(ARGS)

test-all: $(STAMP)  ## Run all tests
	$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

check: $(STAMP)  ## Lint, check types and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hf-dist presets write --check

bench: $(STAMP)  ## Run every benchmark with --quick
	@set -e; for file in $$(grep -l '^    main(run' benchmarks/*.py); do \
	  echo "== $$file"; $(BIN)/python $$file --quick; done

clean:  ## Remove .venv and caches (not runs/)
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
