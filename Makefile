# Every target can be run first: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := $(BIN)/.extras
# The oldest versions have an environment of their own, .venv-oldest.
OLDEST_PYTHON ?= python3.11
OLDEST := .venv-oldest/bin

.PHONY: help demo test test-all test-oldest quick soak coverage check check-newest format bench docs notebooks clean

help:
	@echo "make demo    install, train the first example on real data, show where the results are"
	@echo "make test    run the tests, in a random order; ARGS=\"-k resume\" for a part"
	@echo "make test-all  also those that show the same with more processes, layouts, workers or data"
	@echo "make test-oldest  the same with the oldest versions, of tests/oldest.txt; needs Python 3.11 (OLDEST_PYTHON=...)"
	@echo "make quick   run the quick tests of a single process: for working"
	@echo "make soak    run the tests that kill, launch and resume again and again, for hours"
	@echo "make coverage  run all tests, and list the lines of the package that none of them runs"
	@echo "make check   linter, formatter in check mode, type checker"
	@echo "make check-newest  the type checker for the newest Python"
	@echo "make format  apply the formatter and the linter's fixes"
	@echo "make bench   measure trainers side by side; ARGS=\"--workloads loop\" for a part (see docs/performance.md)"
	@echo "make gpu     run the tests and benchmarks that need a GPU, in 8 minutes; OUTPUT=folder, ARGS=--rehearse on a CPU"
	@echo "make docs    build the documentation, warnings are errors"
	@echo "make pictures   redraw the pictures of the documentation"
	@echo "make notebooks  run the notebooks of the examples, and keep what they show"
	@echo "make release-check    build, install and try the package as users get it (see RELEASING.md)"

$(BIN)/python:
	$(PYTHON) -m venv .venv

# uv installs in seconds what takes pip minutes. pip follows, as uv does not know of mirrors that pip is configured for.
define install
$(1)/python -m pip install --quiet --disable-pip-version-check uv && \
	$(1)/uv pip install --quiet --python $(1)/python $(2) || \
	$(1)/python -m pip install --quiet --disable-pip-version-check $(2)
endef

# A stamp for each set of extras, renewed when pyproject.toml changes.
$(EXTRAS)-%: pyproject.toml | $(BIN)/python
	@echo "Installing into .venv; PyTorch is large ..."
	$(call install,$(BIN),-e ".[$*]")
	@touch $@

demo: $(EXTRAS)-examples
	$(BIN)/python examples/digits.py --output demo

# Compiled files are kept: the tests start many interpreters.
export PYTHONDONTWRITEBYTECODE :=
RUN_TESTS := -m pytest -n auto --maxprocesses 8 --dist loadgroup
PYTEST := $(BIN)/python $(RUN_TESTS)

test: $(EXTRAS)-test
	$(PYTEST) -m "not thorough" $(ARGS)

test-all: $(EXTRAS)-test
	$(PYTEST) $(ARGS)

quick: $(EXTRAS)-test
	$(PYTEST) -m "not processes and not programs and not slow and not thorough" $(ARGS)

soak: $(EXTRAS)-test
	SOAK=1 $(PYTEST) -m soak -o timeout=7200 $(ARGS)

coverage: $(EXTRAS)-test
	$(PYTEST) --cov --cov-report=term-missing:skip-covered $(ARGS)

$(OLDEST)/.installed: tests/oldest.txt pyproject.toml
	$(OLDEST_PYTHON) -m venv .venv-oldest
	$(call install,$(OLDEST),-r tests/oldest.txt -e .)
	@touch $@

# Warnings are no errors there: old versions of other packages warn of each other.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/python $(RUN_TESTS) -W default $(ARGS)

check: $(EXTRAS)-test
	$(BIN)/ruff check .
	$(BIN)/ruff check --target-version py314 --ignore UP,B912 .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-newest: $(EXTRAS)-test
	$(BIN)/mypy --python-version 3.14

format: $(EXTRAS)-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(EXTRAS)-bench
	$(BIN)/python -m benchmarks $(ARGS)

# With .venv, or else with PYTHON, if that has what it takes: nothing is installed then, and there may be no network.
NEEDED_ON_GPU := torch accelerate torchmetrics pytest
OUTPUT ?= gpu_results
.PHONY: gpu
gpu:
	@run() { "$$1" -m tests.gpu --output "$(OUTPUT)" $(ARGS); }; \
	has_all() { "$$1" -c "import sys; from importlib.util import find_spec; \
		sys.exit(not all(map(find_spec, '$(NEEDED_ON_GPU)'.split())))" 2> /dev/null; }; \
	if has_all $(BIN)/python; then run $(BIN)/python; \
	elif [ ! -e $(BIN)/python ] && has_all "$(PYTHON)"; then run "$(PYTHON)"; \
	else $(MAKE) $(EXTRAS)-test && run $(BIN)/python; fi

docs: $(EXTRAS)-test
	rm -f docs/_build/html/.finished
	$(BIN)/python -m sphinx -W --keep-going -j auto -E -a -b html docs docs/_build/html
	@touch docs/_build/html/.finished  # the tests look at these pages
	@echo "The documentation is in docs/_build/html/index.html"

.PHONY: pictures
pictures: $(EXTRAS)-test
	$(BIN)/python docs/pictures.py
notebooks: $(EXTRAS)-test
	$(BIN)/python -m tests.notebooks

.PHONY: release-check
# Tools alone are in its environment; the check makes others for the package, with and without each extra.
release-check:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --upgrade build twine uv pip
	.venv-release/bin/python .ci/release_check.py $(ARGS)

clean:
	rm -rf .venv .venv-oldest .venv-release build dist *.egg-info docs/_build docs/notebooks demo gpu_results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f .coverage .coverage.*
