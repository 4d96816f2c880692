# make test and make demo work in a fresh clone: they make .venv first. PYTHON=python3.12 make ... takes another Python.
PYTHON ?= python3
BIN := .venv/bin
OFFLINE := HF_HUB_OFFLINE=1 WANDB_MODE=offline

.PHONY: demo test lint docs clean

demo: .venv/.installed
	$(BIN)/python examples/demo.py

test: .venv/.installed-dev
	$(OFFLINE) $(BIN)/python -m pytest $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: .venv/.installed
	$(BIN)/python -m trainers.parsing > docs/options.md

# Making the environment again over a broken one mends it.
.venv/.installed: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
