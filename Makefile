# Targets that need .venv first create or update it with the packages of pyproject.toml.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
DEMO := runs/demo
PEER := $(CURDIR)/.peer
# TorchInductor compiles scalar C++: it takes 20 seconds to find out which vector instructions work.
SCALAR := TORCHINDUCTOR_VEC_ISA_OK=0

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all mutants peer lint

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

install: $(INSTALLED)  ## create .venv with everything that this checkout needs (some minutes, 6 GB)

demo: $(INSTALLED)  ## train and evaluate a small network on synthetic street scenes (2 minutes on two cores)
	$(VENV)/bin/python train_seg.py run_dir=$(DEMO) resume=auto trainer.epochs=24 optim=adamw optim.lr=4e-3 lr_schedule.warmup_steps=40
	$(VENV)/bin/python eval.py checkpoint=$(DEMO)/checkpoints/last.pt overlays=$(DEMO)/overlays
	@echo "look at $$(ls -d $(DEMO)/overlays/* | head -n 1) (image, label, prediction); next: $(VENV)/bin/python train_seg.py norm=std"

test: $(INSTALLED)  ## run the tests, of large tables and slow ones a part (4 to 10 minutes on two cores); PYTEST="-k name" adds options
	$(SCALAR) $(VENV)/bin/python -m pytest -n 2 --dist worksteal $(PYTEST)

test-all: $(INSTALLED)  ## run all tests: whole tables and the slow ones (half an hour on two cores)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not gpu" $(PYTEST)

mutants: $(INSTALLED)  ## change the code in 200 places, one at a time, and list what no test notices (half an hour on two cores)
	$(SCALAR) $(VENV)/bin/python -m tools.mutants $(MUTANTS)

peer: $(INSTALLED)  ## build the released inplace_abn against the installed PyTorch and compare with it (6 minutes, a C++ compiler)
	@test -d $(PEER)/inplace_abn || $(VENV)/bin/python -m pip install --quiet --no-deps --target $(PEER)/tools setuptools-scm vcs-versioning
	@test -d $(PEER)/inplace_abn || PYTHONPATH=$(CURDIR)/tests/peer_build:$(PEER)/tools \
		$(VENV)/bin/python -m pip install --no-cache-dir --no-build-isolation --no-deps --target $(PEER) inplace-abn
	PYTHONPATH=$(PEER) $(SCALAR) $(VENV)/bin/python -m pytest -m peer $(PYTEST)

lint: $(INSTALLED)  ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else \
		"error: %s is Python %d.%d: expected 3.10 to 3.13; choose one with make PYTHON=python3.11" % ((sys.executable,) + v))'
	@echo "installing PyTorch and the other packages into $(VENV): downloads 3.3 GB and takes 6.5 GB of disk; 4 minutes with a fast connection"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	@# cityscapesscripts brings a module that hides Python's own typing from the processes in which PyTorch compiles
	$(VENV)/bin/python -m pip uninstall --quiet --yes typing
	@touch $@
