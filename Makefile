# The commands people type. `make demo` and `make test` need only Python ≥ 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/sh

.PHONY: demo test check serve load bench evaluate benchmark faces paper notebook clean help
AUTHORS ?= ../shared/data/evaluating_counterfactuals
CELEBA ?= ../shared/data/celeba

help:
	@echo "make demo      explain a real three into all other digits"
	@echo "make test      every check and test"
	@echo "make serve     the page, on http://127.0.0.1:8000"
	@echo "make load      200 clients at once for a minute against that service, on loopback"
	@echo "make paper     every figure and table of the paper into paper/ (CELEBA=DIR for faces)"
	@echo "make notebook  run the tour from top to bottom and keep what it shows"
	@echo "make bench     what a counterfactual costs, as a ratio to a forward pass"
	@echo "make evaluate  measure the shipped models and write docs/results"
	@echo "make faces     measure the models of faces and heatmaps (CELEBA=DIR, INCEPTION=DIR; hours without a GPU)"
	@echo "make benchmark score counterfactuals beside other methods' and the authors' (half an hour)"

demo: $(VENV)/.demo
	@$(BIN)/ecinn explain --sample 90 --target all --model mnist --out demo
	@echo "Open demo/sample-90-explanation.png"

test: check
	$(BIN)/python -m pytest -q -n 2

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

serve: $(VENV)/.serve
	$(BIN)/ecinn serve

load: $(VENV)/.serve
	$(BIN)/python benchmarks/load.py

paper: $(VENV)/.paper
	$(BIN)/ecinn paper all --out paper $(if $(wildcard $(CELEBA)),--celeba $(CELEBA))

notebook: $(VENV)/.test
	$(BIN)/python notebooks/run.py

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/passes.py

evaluate: $(VENV)/.demo
	for model in mnist fakemnist; do \
		$(BIN)/ecinn evaluate $$model --json > docs/results/$$model.json.new && \
		mv docs/results/$$model.json.new docs/results/$$model.json || exit 1; \
	done

benchmark: $(VENV)/.benchmark
	$(BIN)/ecinn benchmark counterfactuals --model mnist --out docs/results
	$(BIN)/ecinn benchmark counterfactuals --model fakemnist --out docs/results
	$(BIN)/ecinn benchmark consistency --model mnist --out docs/results
	$(BIN)/ecinn benchmark authors --data $(AUTHORS) --out docs/results

faces: $(VENV)/.benchmark
	$(BIN)/ecinn benchmark faces --celeba $(CELEBA) --out docs/results $(if $(INCEPTION),--inception $(INCEPTION))
	$(BIN)/ecinn benchmark consistency --model celeba-smile --celeba $(CELEBA) --out docs/results
	for each in smile:Smiling cheekbones:High_Cheekbones lipstick:Wearing_Lipstick makeup:Heavy_Makeup; do \
		$(BIN)/ecinn benchmark heatmaps --model celeba-$${each%:*} --celeba $(CELEBA) --out docs/results \
			$(if $(INCEPTION),--cnn $(INCEPTION)/$${each#*:}.safetensors) || exit 1; \
	done
	$(BIN)/ecinn benchmark heatmaps --model fakemnist --out docs/results
	$(BIN)/ecinn benchmark rounding --celeba $(CELEBA) --draws 3 --out docs/results \
		--model celeba-smile --model celeba-cheekbones --model celeba-lipstick --model celeba-makeup

# Stamp files: a set-up that broke off is done again.
$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ecinn needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/pip pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.benchmark: $(VENV)/bin/pip pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[benchmark,heatmaps]'
	touch $@ $(VENV)/.demo

$(VENV)/.serve: $(VENV)/bin/pip pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[serve]'
	touch $@ $(VENV)/.demo

$(VENV)/.paper: $(VENV)/bin/pip pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[paper]'
	touch $@ $(VENV)/.demo

$(VENV)/.test: $(VENV)/bin/pip pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache
