# make demo | test | zoo | lint | bench | docs | install | clean
#
# PYTHON         the Python that makes the virtual environment; for `make install` the one that gets
#                torchium (default: the project's virtual environment)
# TORCH          the version of torch, each in an environment and a build folder of its own
# TORCHIUM_CUDA  AUTO (if nvcc is found), ON or OFF

TORCH_OF_CI := 2.11.0
TORCH ?= $(TORCH_OF_CI)
PYTHON ?= python3
export TORCHIUM_CUDA ?= AUTO

SUFFIX := $(if $(filter-out $(TORCH_OF_CI),$(TORCH)),-torch-$(TORCH))
VENV := $(CURDIR)/.venv$(SUFFIX)
BUILD := $(CURDIR)/build$(SUFFIX)
OWN_VENV := $(if $(filter file,$(origin PYTHON)),yes)

export TORCHIUM_BUILD_DIR := $(BUILD)
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
# The compilers list the headers that they read: ccache need not preprocess first.
export CCACHE_DEPEND ?= true
export PATH := $(VENV)/bin:$(PATH)
PIP := python -m pip --disable-pip-version-check
# A few tests at a time to each worker (tests/unit_scheduling.py); but tests of one group to one worker.
WORKERS := -n logical --maxprocesses=8 --dist loadgroup
SETUP_VENV := scripts/setup_venv.sh "$(VENV)" "$(PYTHON)" "$(TORCH)"

.PHONY: demo test zoo lint bench docs install clean package
.NOTPARALLEL:

demo:
	$(SETUP_VENV) examples
	$(MAKE) package
	python examples/python/train_classifier.py --compare

test:
	$(SETUP_VENV) test lint examples
	$(MAKE) lint
	$(MAKE) package CMAKE_FLAGS="-DTORCHIUM_BUILD_TESTS=ON"
	ctest --test-dir "$(BUILD)" --parallel 2 --verbose
	python -m pytest $(WORKERS)

# `make test` trains the same models at a small size.
zoo:
	$(SETUP_VENV) test
	$(MAKE) package
	TORCHIUM_ZOO=whole python -m pytest $(WORKERS) tests/zoo

lint:
	$(SETUP_VENV) lint
	scripts/lint.sh

bench:
	$(SETUP_VENV) bench
	$(MAKE) package
	python benchmarks/run_all.py

docs:
	$(SETUP_VENV) docs
	$(MAKE) package
	python -m sphinx -b html docs docs/_build/html

# Compiles (only what has changed) and installs the packages into the virtual environment. The C++ tests
# are built in the same folder, so nothing is compiled twice.
package:
	cmake -S . -B "$(BUILD)" -G Ninja -DPython_EXECUTABLE="$(VENV)/bin/python" -DTORCHIUM_CUDA=$(TORCHIUM_CUDA) $(CMAKE_FLAGS)
	cmake --build "$(BUILD)"
	$(PIP) install --quiet --no-build-isolation --no-deps --force-reinstall .

install:
ifdef OWN_VENV
	$(SETUP_VENV) examples
	$(MAKE) package
else
	env -u TORCHIUM_BUILD_DIR scripts/install.sh "$(PYTHON)" "$(TORCH)"
endif

clean:
	rm -rf build build-torch-* dist demo docs/_build docs/_doxygen python/*.egg-info python/torchium_cpp/include python/torchium_cpp/share
