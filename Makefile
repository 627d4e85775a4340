# make demo           set-up, then the whole loop on this machine
# make test           set-up, then the tests
# make test-services  set-up with PostgreSQL, Chromium and Airflow, then the tests that need real services or minutes of restarts
# make install        set-up alone; VARIANT=gpu takes vLLM's GPU package of the same version
# make airflow        Airflow in an environment of its own, .venv-airflow
#
# PYTHON=python3.11            which interpreter makes .venv
# TORCH_INDEX_URL=URL          an extra index with torch's +cpu wheels, where pip's own finds none; CPU variant only
SHELL := /bin/bash
VARIANT ?= cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(VARIANT)
PIP := $(BIN)/python -m pip --disable-pip-version-check
EMPTY := $(wildcard packaging/empty/*/pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help install airflow demo test test-services bench lint clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -8

install: $(STAMP)

airflow: install
	@packaging/install_airflow $(BIN)/python .venv-airflow

demo: install
	$(BIN)/slipstream demo

test: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-services: install airflow
	@packaging/install_services "$(PIP)"
	$(BIN)/python -m pytest tests/services tests/long $(PYTEST_ARGS)

bench: install
	@for script in $(filter-out bench/figures.py,$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python $$script --small || exit 1; done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .venv-airflow build *.egg-info .pytest_cache .ruff_cache

$(STAMP): constraints/$(VARIANT).txt pyproject.toml $(EMPTY)
	@packaging/check_python $(PYTHON) $(VARIANT) $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the $(VARIANT) packages into $(VENV) (some minutes, about 3 GB) ..."
	@if [ "$(VARIANT)" = cpu ]; then packaging/install_cpu "$(PIP)"; else packaging/install_gpu "$(PIP)"; fi
	@$(PIP) install -q --no-deps --no-build-isolation -e . 2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $@
	@echo "installed: $(BIN)/slipstream --help"
