# The front door. The work itself is in CMakePresets.json, scripts/ and benchmarks/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
DIST ?= dist
ARGS ?=
AGAINST ?=
export QUICK
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
CLANG_FORMAT ?= clang-format-19
PYTHON ?= python3
export PYTHON
export CMAKE_CXX_COMPILER_LAUNCHER := $(CURDIR)/scripts/launch_compiler.sh
export CCACHE_BASEDIR = $(CURDIR)
export CCACHE_NOHASHDIR = 1
# setup.sh leaves it to Python to compile what it imports, once: without this variable.
unexport PYTHONDONTWRITEBYTECODE
# A wheel is compiled by what Python was, g++: by its other name ccache has the objects already.
ifeq ($(origin CXX),default)
export CXX := c++
endif

SETUP := scripts/setup.sh
PY := .venv/bin/python
RUFF := .venv/bin/ruff
MYPY := .venv/bin/mypy
PYTEST = PYTHONPATH=$(CURDIR)/build/release/python $(PY) -m pytest
PY_FILES = python tests benchmarks examples docs
# Tests of several files beside each other, each with one thread of torch's. Those that measure run
# later, alone. Tests wait for drives and children, so there are more of them than processors.
BESIDE = OMP_NUM_THREADS=1 $(PYTEST) -ra -n $(BESIDE_JOBS) --dist loadfile --no-loadscope-reorder \
	-m 'not alone'
BESIDE_JOBS = $(shell echo $$(($(JOBS) + 1)))
# The files that have some: to collect all others takes longer than some of these tests.
ALONE = $(PYTEST) -ra -m alone $(shell grep -lr --include='test_*.py' 'mark\.alone' tests/python)
QUICK_PYTESTS = $(patsubst %,tests/python/test_%.py,native aio optim initialize)
CPP_FILES = $(shell find src include python tests benchmarks -name '*.h' -o -name '*.cc')
# The command as it was built, with the package for its report.
FERRY = PATH=$(CURDIR)/.venv/bin:$$PATH PYTHONPATH=$(CURDIR)/build/release/python \
	build/release/bin/tensorferry
# Also for a folder that was configured without it.
launcher = -DCMAKE_CXX_COMPILER_LAUNCHER=$(CMAKE_CXX_COMPILER_LAUNCHER)
# Configures a preset and builds it: $(call build,release[,options[,targets]])
build = cmake --preset $(1) --log-level=WARNING $(launcher) $(2) >/dev/null && \
	cmake --build --preset $(1) -j $(JOBS) $(3)
# The same with the Python extension, for the Python of .venv.
with_python = -DTENSORFERRY_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(PY)
build_all = $(SETUP) packages build && $(SETUP) venv && $(call build,release,$(with_python))
# What the sanitizers look at.
ASAN_TESTS ?= all
TSAN_TESTS ?= engines_test memory_test handle_test swap_test checkpoint_test stress_test
FUZZERS = $(patsubst tests/fuzz/%_fuzzer.cc,%,$(wildcard tests/fuzz/*_fuzzer.cc))
# What clang-tidy looks at: the sources, and the tests, for which tests/.clang-tidy has a word.
TIDY_SOURCES ?= /(src(/[a-z]+)+|python/src)/\w+(?<!_test)\.cc$$
TIDY_TESTS ?= /tests/[a-z_]+/\w+\.cc$$|/src(/[a-z]+)+/\w+_test\.cc$$
tidy_files = run-clang-tidy-19 -p build/tidy -j $(JOBS) -quiet -warnings-as-errors='*' $(1) 2>&1 \
	| grep --line-buffered -vE '^([0-9]+ warnings? (generated|treated as errors)\.?)?$$'

# Reports of sanitizers name lines: this program of binutils reads what clang writes.
symbolizer := external_symbolizer_path=$(shell command -v addr2line)
asan fuzz: export ASAN_OPTIONS := $(symbolizer)
asan fuzz: export UBSAN_OPTIONS := print_stacktrace=1:$(symbolizer)
tsan: export TSAN_OPTIONS := $(symbolizer)

# Tests do not depend on what somebody has tuned on this machine.
test quick soak asan tsan fuzz aarch64: export TENSORFERRY_PROFILES :=

.PHONY: build test quick check soak bench compare python-figures command-figures moments-figures plan-figures rank-figures counts format check-format lint tidy asan tsan fuzz aarch64 wheel gpu-wheels test-gpu gpu-figures stubs docs install clean help

build: ## Build the library, the Python package, the tests and the benchmark (build/release)
	@$(build_all)

# The packages and the environment of the tests beside the build, the C++ tests beside those of
# Python. The C++ tests print when they have ended; env lets them hear Ctrl-C, which a shell has its
# jobs in the background ignore.
test: ## Install what is missing, build, run all tests to the end, whichever fails
	@$(SETUP) packages build
	@$(SETUP) venv
	@$(SETUP) packages test docs & packages=$$!; \
		$(SETUP) venv test & venv=$$!; \
		$(call build,release,$(with_python)) && wait $$packages && wait $$venv
	@failed=; \
		env --default-signal ctest --preset release -j $(JOBS) >build/ctest.log 2>&1 & \
		$(BESIDE) tests/house tests/command tests/python || failed+=" pytest"; \
		wait $$! || failed+=" ctest"; \
		cat build/ctest.log; \
		$(ALONE) || failed+=" alone"; \
		if [ -n "$$failed" ]; then echo "make test: failed:$$failed" >&2; exit 1; fi

quick: ## What finds most, within two minutes of a build: the rooms, and the core of both sides
	@$(SETUP) packages build test
	@$(SETUP) venv test
	@$(build_all)
	@$(BESIDE) -q tests/house/test_rooms.py
	@$(BESIDE) -q $(QUICK_PYTESTS)
	@ctest --preset release -j $(JOBS) -LE fault --progress

soak: ## The long versions of the tests of faults and lifetimes (a quarter of an hour)
	@$(SETUP) packages build test
	@$(SETUP) venv test
	@$(build_all)
	@TENSORFERRY_SOAK=1 ctest --preset release -j $(JOBS) -L fault
	@TENSORFERRY_SOAK=1 $(PYTEST) tests/python/test_lifetime.py tests/python/test_snapshot_kills.py

bench: ## Measure this machine and write a report (ARGS=... goes to tensorferry bench)
	@$(SETUP) packages build
	@$(SETUP) venv
	@$(call build,release,$(with_python),-t tensorferry_command tensorferry_python)
	@mkdir -p build/reports
	@$(FERRY) bench --json build/reports/bench.json $(ARGS)
	@$(FERRY) report build/reports/bench.json -o build/reports/bench.html

compare: ## Measure against fio, DeepSpeed, others and the targets (QUICK=1, AGAINST=results.json, ARGS=...)
	@$(SETUP) packages build test
	@$(build_all)
	@$(PY) -m benchmarks.compare $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

python-figures: ## What the Python package adds: import, calls, Ctrl-C, a million reads
	@$(SETUP) packages build test
	@$(SETUP) venv test
	@$(build_all)
	@$(PY) -m benchmarks.figures.python_figures $(ARGS)

command-figures: ## What the command itself costs, and tune against the full grid (8 minutes)
	@$(SETUP) packages build test
	@$(build_all)
	@$(PY) -m benchmarks.figures.command_figures $(ARGS)

rank-figures: ## What eight ranks on one drive reach together, against one (5 minutes)
	@$(SETUP) packages build
	@$(SETUP) venv test
	@$(build_all)
	@PYTHONPATH=$(CURDIR)/build/release/python:$(CURDIR) $(PY) -m benchmarks.figures.rank_figures $(ARGS)

moments-figures: ## What moments in 8 bits cost a small language model (10 minutes)
	@$(SETUP) packages build
	@$(SETUP) venv test
	@$(build_all)
	@PYTHONPATH=$(CURDIR)/build/release/python:$(CURDIR) $(PY) -m benchmarks.figures.moments_figures $(ARGS)

plan-figures: ## What tensorferry plan says beside what happens (8 minutes)
	@$(SETUP) packages build
	@$(SETUP) venv test
	@$(build_all)
	@PYTHONPATH=$(CURDIR)/build/release/python:$(CURDIR) $(PY) -m benchmarks.figures.plan_figures $(ARGS)

counts: ## Instructions of the calls that are made most, against their budget
	@$(SETUP) packages build test
	@$(call build,release,,-t hot_paths)
	@$(PYTHON) -m benchmarks.figures.hot_paths $(ARGS)

format: ## Format all C++ and Python files in place
	@$(SETUP) packages build check
	@$(SETUP) venv check
	@$(CLANG_FORMAT) -i $(CPP_FILES)
	@$(RUFF) format --quiet $(PY_FILES)
	@$(RUFF) check --quiet --fix --select I $(PY_FILES)

check-format: ## Fail if a C++ or Python file is not formatted
	@$(SETUP) packages build check
	@$(SETUP) venv check
	@$(CLANG_FORMAT) --dry-run -Werror $(CPP_FILES)
	@echo "$(words $(CPP_FILES)) C++ files are formatted"
	@$(RUFF) format --check $(PY_FILES)

lint: ## ruff and mypy over the Python files; a warning fails
	@$(SETUP) packages build
	@$(SETUP) venv check
	@$(RUFF) check $(PY_FILES)
	@$(MYPY)

check: check-format lint asan fuzz tsan tidy ## All that looks closer than the tests (half an hour)

tidy: ## clang-tidy over the sources and tests (TIDY_SOURCES=regex, TIDY_TESTS=regex); a warning fails
	@$(SETUP) packages build check
	@$(SETUP) venv
	@cmake --preset tidy --log-level=WARNING $(with_python) >/dev/null
	@failed=0; \
		$(call tidy_files,'$(TIDY_SOURCES)') || failed=1; \
		$(call tidy_files,-config-file tests/.clang-tidy '$(TIDY_TESTS)') || failed=1; \
		exit $$failed

asan: ## The C++ tests (ASAN_TESTS=...) with AddressSanitizer and UndefinedBehaviorSanitizer (build/asan)
	@$(SETUP) packages build test check
	@$(call build,asan,,-t $(ASAN_TESTS))
	@ctest --preset asan -j $(JOBS) -E _NOT_BUILT$$

tsan: ## The tests of threads (TSAN_TESTS=...) with ThreadSanitizer (build/tsan)
	@$(SETUP) packages build test check
	@$(call build,tsan,,-t $(TSAN_TESTS))
	@ctest --preset tsan -j $(JOBS) -E _NOT_BUILT$$

# Their files are in memory: they write a new one for every input.
fuzz: ## All fuzzers (FUZZERS=...), together for FUZZ_SECONDS=60, with inputs by chance or by FUZZ_SEED (build/asan)
	@$(SETUP) packages build test check
	@$(call build,asan,,-t $(FUZZERS:=_fuzzer))
	@for fuzzer in $(FUZZERS); do \
		echo "fuzzing: $$fuzzer"; \
		corpus=$$PWD/build/corpus/$$fuzzer; crashes=tests/fuzz/crashes/$$fuzzer; \
		mkdir -p $$corpus $$crashes; \
		cp tests/fuzz/seeds/$$fuzzer/* $$corpus 2>/dev/null || true; \
		cases=tests/shared/$${fuzzer}_cases.py; \
		[ ! -f $$cases ] || $(PYTHON) $$cases $$corpus; \
		(cd /dev/shm && $(CURDIR)/build/asan/tests/fuzz/$${fuzzer}_fuzzer -verbosity=0 \
			-print_final_stats=1 -seed=$(FUZZ_SEED) -max_total_time=$$(($(FUZZ_SECONDS) / $(words $(FUZZERS)))) \
			-artifact_prefix=$(CURDIR)/$$crashes/ $$corpus $(CURDIR)/$$crashes) || exit 1; \
		rmdir -p --ignore-fail-on-non-empty $$crashes; \
	done

aarch64: ## The library, the command and the C++ tests for aarch64, run by qemu (build/aarch64)
	@$(SETUP) packages build aarch64
	@$(SETUP) sysroot
	@$(call build,aarch64)
	@ctest --preset aarch64 -j $(JOBS) \
		-E "$$(sed -n 's/^\([^# ][^ ]*\) .*/\1/p' tests/not_under_qemu.txt | paste -sd '|')"

wheel: ## A wheel for PYTHON=python3 in DIST=dist; from 3.12 on it serves all later ones
	@$(SETUP) packages build
	@$(PYTHON) -m venv --clear build/wheel-venv
	@build/wheel-venv/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps \
		--wheel-dir $(DIST) .
	@ls $(DIST)

gpu-wheels: ## What test-gpu and gpu-figures need, into build/carry; PYTHON is that of the GPU machine
	@$(MAKE) wheel DIST=build/carry
	@build/wheel-venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps \
		--only-binary :all: --dest build/carry -r scripts/requirements-gpu.txt
	@$(SETUP) venv test
	@$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation \
		--wheel-dir build/carry deepspeed
	@$(call build,release,,-t ferry_job raw_ring raw_threads tensorferry)
	@for program in ferry_job raw_ring raw_threads; do \
		strip -o build/carry/$$program build/release/benchmarks/$$program; done
	@strip -o build/carry/libtensorferry.so.0.1 build/release/libtensorferry.so
	@ls build/carry

test-gpu: ## The tests on a GPU, from build/carry: copy the tree there; no network is needed
	@scripts/gpu.sh tests $(ARGS)

gpu-figures: ## The figures of tensors on a GPU, from build/carry
	@scripts/gpu.sh figures $(ARGS)

stubs: build ## Write the type stubs of the extension anew
	@PYTHONPATH=$(CURDIR)/build/release/python $(PY) -m nanobind.stubgen -m tensorferry._core \
		-p python/stub_patterns.txt -o python/tensorferry/_core.pyi

docs: ## Build the site of the documents; a warning fails (build/docs/index.html)
	@$(SETUP) packages build docs
	@$(SETUP) venv docs
	@$(call build,release,$(with_python),-t tensorferry_command tensorferry_python)
	@PYTHONPATH=$(CURDIR)/build/release/python $(PY) -m sphinx -q -W --keep-going -b html \
		-d build/docs-work/doctrees docs build/docs
	@echo "build/docs/index.html"

install: build ## Install into PREFIX=/usr/local
	@cmake --install build/release --prefix $(PREFIX)

clean: ## Remove what was built; .venv stays
	@rm -rf build

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) \
		| while IFS=$$'\t' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done
