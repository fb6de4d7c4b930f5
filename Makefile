# make train   from a fresh clone: install, train CartPole-v1, evaluate, say what to do next
# make test    ruff, mypy --strict, pytest
# make prove   the long proofs: many seeds, many kills
# make bench   the benchmarks against Stable-Baselines3, cpprb and Ray, and of several learners (about two hours)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: train test lint types prove bench clean

train: .make/core
	env -u OMP_NUM_THREADS $(BIN)/qfleet train CartPole-v1

test: .make/dev lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

lint: .make/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .make/dev
	$(BIN)/mypy

prove: .make/dev
	$(BIN)/python -m pytest -n 2 --dist load --timeout 0 prove
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long

bench: .make/bench
	for b in cartpole_updates cartpole_time pong_steps replay_vs_cpprb wire sync_speed sync_learning late_gradients; do env -u OMP_NUM_THREADS $(BIN)/python benchmarks/$$b.py || exit 1; done

# torch first and pinned: an open requirement would fetch gigabytes of GPU libraries.
.make/venv:
	$(PYTHON) -m venv $(VENV)
	mkdir -p .make && touch $@

.make/core: .make/venv pyproject.toml constraints.txt
	$(PIP) torch -e .
	touch $@

.make/dev: .make/core
	$(PIP) -e .[dev]
	touch $@

.make/bench: .make/dev
	$(PIP) -e .[dev,bench]
	touch $@

clean:
	rm -rf $(VENV) .make build dist *.egg-info
