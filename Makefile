# `make demo` and `make test` do everything on a fresh machine with Python >= 3.11, a C++17 compiler and make.
PYTHON ?= python3
BIN := .venv/bin
MODEL := build/models/smollm2-135m-instruct
NATIVE := CMakeLists.txt $(wildcard kernels/*/*)
PIP := $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt
# A pip that needs extra settings can be given them here: make PIP_FLAGS=...
PIP_FLAGS ?=
# Each file's tests stay in one process, for what they share; files begin in the order of their names, small ones last.
WORKERS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test check lint types layers docs docs-check fmt install install-dev model bench-smoke constraints clean

demo: install build/models/wiki.txt $(MODEL)
	$(BIN)/python benchmarks/ladder.py

test: install-dev build/models/wiki.txt $(MODEL)
	TQ_REQUIRE_MODEL=1 TQ_MAX_SKIPS=0 $(BIN)/python -m pytest $(WORKERS)

# Quick rounds while working: everything that needs no real model and takes no long time.
quick: install-dev
	$(BIN)/python -m pytest -m "not model and not slow" -x -q

check: lint types layers docs-check

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

layers: install-dev
	$(BIN)/lint-imports

fmt: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install-dev
	$(BIN)/python kernels/generate_constants.py
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_recipes.py

docs-check: install-dev
	$(BIN)/python kernels/generate_constants.py --check
	$(BIN)/python docs/generate_cli.py --check
	$(BIN)/python docs/generate_recipes.py --check

bench-smoke: install-dev
	$(BIN)/python benchmarks/bench_encode.py --blocks 11 --repeats 1 --k 3
	$(BIN)/python benchmarks/bench_convert.py --synthetic-gb 0.05 --repeats 1

install: .venv/installed
install-dev: .venv/installed-dev
model: $(MODEL)

.venv/tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(PIP_FLAGS) cmake ninja nanobind scikit-build-core
	touch $@

.venv/installed: .venv/tools pyproject.toml $(NATIVE)
	$(PIP) $(PIP_FLAGS) --no-build-isolation -e '.[report,serve]'
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) $(PIP_FLAGS) --no-build-isolation -e '.[dev,report]'
	touch $@

build/models/smollm2-135m-instruct.gguf: | .venv/installed
	$(BIN)/python benchmarks/fetch_models.py smollm2 build/models

build/models/wiki.txt: | .venv/installed
	$(BIN)/python benchmarks/fetch_models.py texts build/models

$(MODEL): build/models/smollm2-135m-instruct.gguf | .venv/installed
	$(BIN)/tqtool import-gguf $< $@

# Pin what is installed now; torch without its local build tag, so that any index can serve it.
constraints: install-dev
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' | grep -v '^-e\|@ file' > constraints.txt

clean:
	rm -rf build .venv
