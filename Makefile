# Every target can be run first: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := $(BIN)/.extras

.PHONY: help demo test check format bench docs clean

help:
	@echo "make demo    install, train the first example on real data, show where the results are"
	@echo "make test    run all tests"
	@echo "make check   linter, formatter in check mode, type checker"
	@echo "make format  apply the formatter and the linter's fixes"
	@echo "make bench   measure trainers side by side; ARGS=\"--workloads loop\" for a part (see docs/performance.md)"
	@echo "make docs    build the documentation, warnings are errors"
	@echo "make release-check    build, install and try the package as users get it (see RELEASING.md)"

$(BIN)/python:
	$(PYTHON) -m venv .venv

# A stamp for each set of extras, renewed when pyproject.toml changes.
$(EXTRAS)-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@

demo: $(EXTRAS)-examples
	$(BIN)/python examples/digits.py --output demo

test: $(EXTRAS)-test
	$(BIN)/python -m pytest $(ARGS)

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

.PHONY: release-check
# Tools alone are in its environment; the check makes others for the package, with and without each extra.
release-check:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --upgrade build twine uv pip
	.venv-release/bin/python .ci/release_check.py $(ARGS)

clean:
	rm -rf .venv .venv-release build dist *.egg-info docs/_build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
