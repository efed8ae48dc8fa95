# make demo, make test: each sets up all it needs in .venv and is quick the second time.
# make venv is the step they share. CUDNN_GROUPED_BUILD_CUDA, CUDNN_GROUPED_CUDA_ARCHS: see setup.py.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
NVCC := $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
WORKERS ?= 2
# Folders are listed too: their time changes when a file is added or removed.
SOURCES := $(shell find csrc) $(wildcard third_party/cutlass/include/cutlass/version.h)
CXX_FILES = $(shell git ls-files --cached --others --exclude-standard csrc tests | grep -E '\.(h|cc|cu|cuh)$$')
# A change of these rebuilds too.
SWITCHES := $(CUDNN_GROUPED_BUILD_CUDA) $(CUDNN_GROUPED_CUDA_ARCHS) $(CUDA_HOME) $(CXX)

.PHONY: venv demo test lint format bench clean FORCE

venv: .venv/.built .venv/.installed

demo: venv
	$(BIN)/python -m cudnn_grouped demo
	$(BIN)/python examples/train_moe.py --recipe mxfp8 --steps 30 --out build/demo

# One thread a worker: tests that are about threads set their number themselves.
# The tests compile the CUDA code as well: a machine without a toolkit gets the compiler from the package index.
test: $(if $(NVCC),,.venv/.cuda-build)
	@$(MAKE) --no-print-directory venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests $(PYTEST_ARGS)

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: .venv/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: venv
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf build dist *.egg-info .venv/.built .venv/.installed cudnn_grouped/*.so cudnn_grouped/_build_config.py

.venv/.created:
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.requirements: requirements/venv.txt requirements/cutlass.txt | .venv/.created
	$(PIP) -r requirements/venv.txt
	$(PIP) --no-deps -r requirements/cutlass.txt
	@touch $@

.venv/.lint: requirements/lint.txt | .venv/.created
	$(PIP) -r requirements/lint.txt
	@touch $@

.venv/.cuda-build: requirements/cuda-build.txt | .venv/.created
	$(PIP) -r requirements/cuda-build.txt
	@touch $@

# Holds the switches' values, and is rewritten only when they change.
.venv/.switches: FORCE | .venv/.created
	@echo '$(SWITCHES)' | cmp -s - $@ || echo '$(SWITCHES)' > $@

# ninja compiles only what changed. `installed` is for the package's metadata: an editable install sees every rebuild.
# compat: a path, for setuptools' finder gives way to a folder of the package's name that holds the clone.
.venv/.built: setup.py pyproject.toml .venv/.requirements .venv/.switches $(wildcard .venv/.cuda-build) $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

.venv/.installed: setup.py pyproject.toml | .venv/.built
	$(PIP) --no-build-isolation --no-deps --config-settings editable_mode=compat --editable .
	@touch $@
