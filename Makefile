# SPDX-License-Identifier: Apache-2.0
#   make demo    generate text from the shipped checkpoint, with ReplaySSM and with conventional decoding
#   make test    everything that runs on this machine
# Both create .venv in the checkout and install into it. nvcc is used if it is there; without it the build is CPU only.
SHELL := /bin/sh
PYTHON ?= python3
CUDA_ARCHITECTURES ?= 80;90a;100a;103a;120a

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE_SOURCES := CMakeLists.txt pyproject.toml constraints.txt $(wildcard cmake/*) trtllm_replayssm/_core.cpp \
                  $(shell find cpp plugins -type f)

.PHONY: demo test triton-server clean

demo: $(VENV)/installed
	$(BIN)/trtllm-replayssm info
	$(BIN)/trtllm-replayssm demo --checkpoint examples/tiny-nemotron-h

test: $(VENV)/installed-test triton-server build/core/replayssm_test
	build/core/replayssm_test
	build/core/plugin_test build/core/libtrtllm_replayssm_plugins.so
	build/core/plugin_harness build/core/libtrtllm_replayssm_plugins.so --quick --few 24 --steps 100 \
	    $$(ls $(VENV)/lib/python3*/site-packages/tensorrt_lean_libs/libnvinfer_lean.so.* 2> /dev/null | sed 's/^/--registry /') \
	    > build/core/plugin_harness.log || { cat build/core/plugin_harness.log; exit 1; }
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python $(NATIVE_SOURCES)
	$(PIP) install --quiet --constraint constraints.txt "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.26" ninja
	$(PIP) install --quiet --constraint constraints.txt --no-deps kernel-lens
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation \
	    --config-settings=build-dir=build/python \
	    --config-settings=cmake.define.REPLAYSSM_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)" \
	    --editable ".[runtime]"
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt "trtllm-replayssm[test]"
	touch $@

# tritonserver for the tests. Where it cannot be installed, they are skipped and say so.
triton-server: $(VENV)/installed
	scripts/triton_server.sh $(BIN)/python || echo "make: no tritonserver: its tests are skipped"

build/core/replayssm_test: $(VENV)/installed $(NATIVE_SOURCES)
	$(BIN)/cmake -S . -B build/core -G Ninja "-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja" \
	    "-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python" -DREPLAYSSM_CUDA=OFF -DREPLAYSSM_BUILD_TESTS=ON > build/core.log
	$(BIN)/cmake --build build/core >> build/core.log

clean:
	rm -rf $(VENV) build
