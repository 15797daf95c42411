PYTHON ?= python3
# `make test TORCH_INDEX="--index-url https://…"` takes torch from another index.
TORCH_INDEX ?=
BIN = .venv/bin

.PHONY: demo test lint types bench clean

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/tested: .venv/installed constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH_INDEX) torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,peers]"
	touch $@

demo: .venv/installed  ## install, then predict the article's 10B case before and after
	$(BIN)/zsim run experiments/roberta_10b_p4d_before.yaml
	$(BIN)/zsim run experiments/roberta_10b_p4d_after.yaml

test: .venv/tested lint types  ## everything that must hold on main
	$(BIN)/python -m pytest

lint: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/tested
	$(BIN)/mypy

bench: .venv/tested  ## print the speed and accuracy figures, dated
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv out dist
