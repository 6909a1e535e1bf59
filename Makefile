# `make demo` and `make test` set up all they need in .venv; nothing else has to be installed.
# Tests of pages need a browser too: `make browser` installs it, and without it they are skipped. So are
# tests of databases without PostgreSQL, which `make postgres` installs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ROOT := $(if $(filter 0,$(shell id -u)),,sudo -n)

.PHONY: demo test test-slow noise bench bundle dist browser postgres docs faults fuzz lint format types rings check clean

$(READY): pyproject.toml core/pyproject.toml paper/pyproject.toml examples/late/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt "pip>=25.1"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ./core --editable . --editable ./paper --editable ./examples/late --group dev
	touch $(READY)

demo: $(READY)  ## the flagship study on this machine, and its report
	$(BIN)/fedtmle demo --report report.html

test: $(READY)  ## all but the long tests, on two cores
	$(BIN)/pytest --numprocesses 2 --dist loadfile

test-slow: $(READY)  ## the long and statistical tests
	$(BIN)/pytest -m slow

SCHEDULES ?= 1000000
FIRST ?= 0
faults: $(READY)  ## many fault schedules; ends with status 1 at a divergence
	$(BIN)/python -m tests.runtime.faults --schedules $(SCHEDULES) --first $(FIRST)

SECONDS ?= 60
fuzz: $(READY)  ## every decoder, guided by coverage; needs a Python that atheris has wheels for
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --group fuzz
	$(BIN)/python -m fuzz.decoders .fuzz/corpus $(SECONDS)

.peers: tests/model/peers.txt $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ --requirement $<

noise: .peers  ## the sampler of noise against its law and OpenDP, its accounting against dp-accounting
	PYTHONPATH=.peers $(BIN)/pytest core/tests/test_noise.py tests/model/test_budget.py

browser:  ## the browser that the tests of pages use, where it may be installed
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { command -v apt-get >/dev/null && $(ROOT) apt-get update -q && \
	    $(ROOT) apt-get install -q -y --no-install-recommends chromium chromium-driver; } || \
	  { echo "chromium and chromedriver could not be installed; tests of pages are skipped without them" >&2; exit 1; }

postgres:  ## the server that the tests of databases start, where it may be installed
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || \
	  { command -v apt-get >/dev/null && $(ROOT) apt-get update -q && \
	    $(ROOT) apt-get install -q -y --no-install-recommends postgresql; } || \
	  { echo "PostgreSQL could not be installed; tests of databases are skipped without it" >&2; exit 1; }

$(VENV)/.docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
	touch $@

GALLERY ?= 1
docs: $(VENV)/.docs  ## the documentation, in build/site; a dead link fails; GALLERY=0 does not run the worked studies
	$(BIN)/python -m tools.document
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -D plot_gallery=$(GALLERY) docs build/site

bundle: $(READY)  ## an installation for machines without a network, in build/bundle
	rm -rf build/bundle
	$(BIN)/python -m tools.bundle build/bundle

dist: $(READY)  ## the distributions of the core, the package and the paper, checked, in build/dist
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --group release
	rm -rf build/dist
	$(BIN)/python -m hatchling build --directory $(CURDIR)/build/dist
	cd core && $(CURDIR)/$(BIN)/python -m hatchling build --directory $(CURDIR)/build/dist
	cd paper && $(CURDIR)/$(BIN)/python -m hatchling build --directory $(CURDIR)/build/dist
	$(BIN)/twine check --strict build/dist/*

BENCH_VENV := benchmarks/.venv
BENCH ?=

$(BENCH_VENV)/.ready: pyproject.toml core/pyproject.toml paper/pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement benchmarks/requirements.txt --editable ./core --editable . --editable ./paper
	touch $(BENCH_VENV)/.ready

bench: $(BENCH_VENV)/.ready  ## ratios beside memory, C and the peers, into docs/benchmarks.md; BENCH=--quick
	$(BENCH_VENV)/bin/python -m benchmarks.bench $(BENCH)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## rewrite the files as `lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

rings: $(READY)  ## imports point inward
	$(BIN)/lint-imports

check: lint types rings

clean:
	rm -rf $(VENV) $(BENCH_VENV) .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .fuzz
