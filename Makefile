# Every target can be run first: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := $(BIN)/.extras

.PHONY: help demo test quick soak coverage check format bench docs clean

help:
	@echo "make demo    install, train the first example on real data, show where the results are"
	@echo "make test    run all tests, in a random order; ARGS=\"-k resume\" for a part"
	@echo "make quick   run the tests of one process, in less than a minute: for working"
	@echo "make soak    run the tests that kill and launch again and again, for long"
	@echo "make coverage  run all tests, and list the lines of the package that none of them runs"
	@echo "make check   linter, formatter in check mode, type checker"
	@echo "make format  apply the formatter and the linter's fixes"
	@echo "make bench   measure trainers side by side; ARGS=\"--workloads loop\" for a part (see docs/performance.md)"
	@echo "make docs    build the documentation, warnings are errors"

$(BIN)/python:
	$(PYTHON) -m venv .venv

# A stamp for each set of extras, renewed when pyproject.toml changes.
$(EXTRAS)-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@

demo: $(EXTRAS)-examples
	$(BIN)/python examples/digits.py --output demo

# Compiled files are kept: the tests start many interpreters.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadgroup

test: $(EXTRAS)-test
	$(PYTEST) $(ARGS)

quick: $(EXTRAS)-test
	$(PYTEST) -m "not processes and not programs" $(ARGS)

soak: $(EXTRAS)-test
	SOAK=1 $(PYTEST) -k "kill or launched or ranks or trainers" $(ARGS)

coverage: $(EXTRAS)-test
	$(PYTEST) --cov --cov-report=term-missing:skip-covered $(ARGS)

check: $(EXTRAS)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(EXTRAS)-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(EXTRAS)-bench
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(EXTRAS)-test
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@echo "The documentation is in docs/_build/html/index.html"

clean:
	rm -rf .venv build dist *.egg-info docs/_build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
