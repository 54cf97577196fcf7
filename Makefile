# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS := benchmarks/results
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
	OMP_NUM_THREADS=1 $(BIN)/ragcachekit bench ttft --tiers host,disk --runs 3 \
		--json $(RESULTS)/ttft-1-thread.json --plot $(RESULTS)/ttft-1-thread.png
	OMP_NUM_THREADS=2 $(BIN)/ragcachekit bench ttft --tiers host,disk --runs 5 \
		--json $(RESULTS)/ttft-2-threads.json --plot $(RESULTS)/ttft-2-threads.png
	OMP_NUM_THREADS=1 $(BIN)/ragcachekit bench query-cache --lookups 500 --questions 40 \
		--json $(RESULTS)/query-cache.json --plot $(RESULTS)/query-cache.png

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --timeout 1200

# torch first and pinned: an unpinned torch pulls gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once, a few minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-out
