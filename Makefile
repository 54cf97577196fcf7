# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE := 1

.PHONY: demo test lint bench soak clean

demo: $(STAMP)
	$(BIN)/ragcachekit demo --out demo-out

# One BLAS thread: the suite's tensors are tiny, and threads would only wait for each other.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/ragcachekit bench ttft --shape smollm2-135m --json benchmarks/results/ttft.json --plot benchmarks/results/ttft.png
	OMP_NUM_THREADS=1 $(BIN)/ragcachekit bench query-cache --json benchmarks/results/query-cache.json --plot benchmarks/results/query-cache.png

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --timeout 1200

# torch first and pinned: an unpinned torch pulls gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-out
