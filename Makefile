# make run   set everything up, start two expert servers, answer a few prompts with the demo model
# make test  set everything up, check style and types, run all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint types tests proto docs clean

run: $(STAMP)
	$(BIN)/python examples/run_demo.py

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	$(BIN)/python -m pytest

proto: $(STAMP)
	$(BIN)/python -m moeoffload.control.generate

docs: $(STAMP)
	$(BIN)/python -m moeoffload.settings > docs/settings.md

# torch first and alone: its CPU build is chosen by the pinned version, which a range from another package would undo.
$(STAMP): constraints.txt pyproject.toml
	test -x "$(BIN)/python" || $(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch "$(STAMP)"

clean:
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
