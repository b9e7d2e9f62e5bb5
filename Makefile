# make run   set everything up, start two expert servers, answer a few prompts with the demo model
# make test  set everything up, check style and types, run all tests
# make gpu   on a machine with a GPU: the tests of what runs there
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Half of a test's time is waiting for processes to start and to stop: three at a time on two cores.
TEST_WORKERS ?= 3
NATIVE_SOURCES := $(shell find moeoffload -name "*.[ch]")

.PHONY: run test gpu lint types tests browser proto docs clean

run: $(STAMP)
	$(BIN)/python examples/run_demo.py

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP) browser
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

gpu: $(STAMP)
	TESTS_ON_GPU=1 $(BIN)/python -m pytest tests/on_gpu tests/gpu_kernels tests/test_staging.py

# The dashboard is tested in a real browser; where none can be installed, its tests are skipped and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || true

proto: $(STAMP)
	$(BIN)/python proto/generate.py

docs: $(STAMP)
	$(BIN)/python bench/settings_page.py > docs/settings.md

# torch first and alone: its CPU build is chosen by the pinned version, which a range from another package would undo.
$(STAMP): constraints.txt pyproject.toml setup.py $(NATIVE_SOURCES)
	test -x "$(BIN)/python" || $(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch "$(STAMP)"

clean:
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
