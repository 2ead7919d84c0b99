# The commands people type. `make demo` and `make test` need only Python 3.11 or newer, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --editable
SHELL := /bin/sh
AUTHORS ?= ../shared/data/evaluating_counterfactuals
CELEBA ?= ../shared/data/celeba
FACES ?= 500

# Threads that wait sleep instead of spin: spinning stalls everything on cores with other work.
export OMP_WAIT_POLICY ?= PASSIVE
# Keep compiled modules between runs: compiling them takes longer than many tests.
unexport PYTHONDONTWRITEBYTECODE

# The tests of a file stay on one worker, so that what they share is made once.
PYTEST := $(BIN)/python -m pytest -q -rs -n 2 --dist loadfile

.PHONY: help demo test quick check docs serve load paper notebook bench evaluate benchmark faces clean

help:
	@echo "make demo       explain a handwritten three against all other digits"
	@echo "make quick      the fast tests: about a minute"
	@echo "make test       all checks and tests: about five minutes"
	@echo "make check      formatting, lint, types and import contracts"
	@echo "make docs       build the documentation site; broken links fail"
	@echo "make serve      the web page and API on http://127.0.0.1:8000"
	@echo "make load       200 clients at once for a minute against the service, on loopback"
	@echo "make paper      every figure and table of the paper into paper/ (CELEBA=DIR for faces, PAPER_MODEL=FILE for claims)"
	@echo "make notebook   run the tour from top to bottom and keep its output"
	@echo "make bench      cost beside other methods and its growth (15 minutes; VENV=.venv-alibi ALIBI=1: with alibi, an hour)"
	@echo "make evaluate   measure the shipped models and write docs/results"
	@echo "make benchmark  compare with other methods and with the authors' results (half an hour)"
	@echo "make faces      measure the face models (CELEBA=DIR, INCEPTION=DIR, FACES=32 for their heatmaps; hours without a GPU)"
	@echo "make clean      remove the virtual environment, caches and build outputs"

demo: $(VENV)/.demo
	@$(BIN)/ecinn explain --sample 90 --target all --model mnist --correct --out demo
	@echo "Open demo/sample-90-explanation.png"

test: check
	$(PYTEST)

quick: $(VENV)/.test
	$(PYTEST) -m "not slow and not browser and not celeba"

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

serve: $(VENV)/.serve
	$(BIN)/ecinn serve

load: $(VENV)/.serve
	$(BIN)/python benchmarks/load.py

paper: $(VENV)/.paper
	$(BIN)/ecinn paper all --out paper $(if $(wildcard $(CELEBA)),--celeba $(CELEBA)) \
		$(if $(PAPER_MODEL),--paper-model $(PAPER_MODEL))

notebook: $(VENV)/.test
	$(BIN)/python notebooks/run.py

bench: $(VENV)/.bench$(if $(ALIBI),-alibi)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/speed.py

evaluate: $(VENV)/.demo
	for model in mnist fakemnist; do \
		$(BIN)/ecinn evaluate $$model --device cpu --json > docs/results/$$model.json.new && \
		mv docs/results/$$model.json.new docs/results/$$model.json || exit 1; \
	done

benchmark: $(VENV)/.benchmark
	$(BIN)/ecinn benchmark counterfactuals --model mnist --device cpu --out docs/results
	$(BIN)/ecinn benchmark counterfactuals --model fakemnist --device cpu --out docs/results
	$(BIN)/ecinn benchmark consistency --model mnist --device cpu --out docs/results
	$(BIN)/ecinn benchmark authors --data $(AUTHORS) --device cpu --out docs/results
	$(BIN)/ecinn benchmark controls --device cpu --out docs/results

faces: $(VENV)/.benchmark
	$(BIN)/ecinn benchmark faces --celeba $(CELEBA) --out docs/results $(if $(INCEPTION),--inception $(INCEPTION))
	$(BIN)/ecinn benchmark consistency --model celeba-smile --celeba $(CELEBA) --out docs/results
	for pair in smile:Smiling cheekbones:High_Cheekbones lipstick:Wearing_Lipstick makeup:Heavy_Makeup; do \
		$(BIN)/ecinn benchmark heatmaps --model celeba-$${pair%:*} --celeba $(CELEBA) --out docs/results --n $(FACES) \
			--cnn $(if $(INCEPTION),$(INCEPTION)/$${pair#*:}.safetensors,residual) || exit 1; \
	done
	$(BIN)/ecinn benchmark heatmaps --model fakemnist --out docs/results

# A stamp file records each finished installation; an interrupted one is repeated.
$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ecinn needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/pip pyproject.toml
	$(INSTALL) .
	touch $@

$(VENV)/.bench: EXTRAS := benchmark,bulk
$(VENV)/.bench-alibi: EXTRAS := alibi,benchmark,bulk
$(VENV)/.benchmark: EXTRAS := benchmark,heatmaps,inception
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.paper: EXTRAS := paper
$(VENV)/.serve: EXTRAS := serve
$(VENV)/.test: EXTRAS := test
$(VENV)/.bench $(VENV)/.bench-alibi $(VENV)/.benchmark $(VENV)/.docs $(VENV)/.paper $(VENV)/.serve $(VENV)/.test: \
		$(BIN)/pip pyproject.toml
	$(INSTALL) '.[$(EXTRAS)]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) demo site build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
