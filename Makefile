# Every target creates .venv at the root when needed and runs in it.
#   PYTHON=python3.12    the interpreter that .venv is made from
#   AGENTR1_TORCH=cpu    cpu or gpu: decide by hand which torch a fresh .venv gets
#   ARGS=training.seed=1  settings for demo, options for test, notebooks and bench
#   DEMO_THREADS=1        threads of the demo, where the machine is busy

PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PY := $(BIN)/python
READY := $(VENV)/.ready

# On two cores one thread a process is the safe choice: two threads beside another busy core are many times slower.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# The demo is meant for a machine that does nothing else: two threads took 60 % of the time of one.
DEMO_THREADS ?= 2
demo: export OMP_NUM_THREADS = $(DEMO_THREADS)

CHECK_PYTHON := import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python " + sys.version.split()[0] + " is too old: make PYTHON=... needs 3.10 or newer")
HAS_TORCH := import importlib.metadata as m, sys; sys.exit(tuple(map(int, m.version("torch").split(".")[:2])) < (2, 6))

.PHONY: help setup demo lab test notebooks bench lint format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## create .venv and install requirements.txt and the package

# The environment shares the packages of PYTHON only when a fitting torch is among them, so that torch is kept.
# A machine with neither torch nor NVIDIA GPU gets the version in constraints-cpu.txt.
$(READY): requirements.txt constraints-cpu.txt pyproject.toml
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then share=--system-site-packages; else share=; fi; \
	  echo "creating $(VENV) $$share"; $(PYTHON) -m venv --clear $$share $(VENV); }
	@cpu='-c constraints-cpu.txt'; \
	if $(PY) -c '$(HAS_TORCH)' 2>/dev/null; then cpu=; echo "keeping the installed torch"; \
	else case "$${AGENTR1_TORCH:-auto}" in \
	  cpu) ;; \
	  gpu) cpu= ;; \
	  auto) if nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; then cpu=; fi ;; \
	  *) echo "AGENTR1_TORCH is '$$AGENTR1_TORCH': expected cpu, gpu or auto" >&2; exit 2 ;; esac; \
	  echo "installing requirements.txt $$cpu (a few minutes)"; fi; \
	$(PY) -m pip install -qq --disable-pip-version-check -r requirements.txt $$cpu
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $(READY)

demo: $(READY)  ## train the tiny agent through the three phases, evaluate it, write runs/demo
	$(PY) -m agentr1_lite train atlas-tiny evaluation.split=test $(ARGS) --fresh --report

lab: $(READY)  ## open the lessons in JupyterLab
	$(PY) -m jupyterlab --ServerApp.root_dir=. notebooks/00_start_here.ipynb $(ARGS)

test: $(READY)  ## run the tests
	$(PY) -m pytest $(ARGS)

notebooks: $(READY)  ## write and execute the lessons' notebooks from their sources
	$(PY) notebooks/build.py $(ARGS)

bench: $(READY)  ## compare an online step with TRL's on this machine
	$(PY) tests/benchmarks/vs_trl.py --json $(ARGS)

lint: $(READY)  ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY)  ## format the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove .venv, caches and build output; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
