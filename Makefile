# Everything is installed into .venv; nothing else on the machine changes. Needs python3 (3.11 to 3.14) with venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# What `make train` trains; examples/stdlib.toml is a small one.
JOB ?= examples/moe.toml

.PHONY: train train-plain test check types bench docs
.DELETE_ON_ERROR:

train: $(READY)
	$(BIN)/roadtrain train $(JOB) $(ARGS)

# The same by plain PyTorch under the same limit of memory. Exit code 3 is the limit's: that is what it shows.
train-plain: $(READY)
	$(BIN)/python examples/train_plain.py $(JOB) $(ARGS) || test $$? -eq 3

# What needs no hardware first; then real processes; then what needs root and loop devices (skips itself without).
test: $(READY)
	$(BIN)/pytest -n 2 $(wildcard tests/unit tests/contract tests/golden) $(ARGS)
	$(BIN)/pytest $(wildcard tests/local tests/lab) $(ARGS)

check: $(READY) types docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pytest tests/unit/test_layers.py tests/unit/test_public_names.py

types: $(READY)
	$(BIN)/mypy -p roadtrain -p benchmarks -p roadtrain_rdma

# The site, in build/site: strictly, so a link that leads nowhere is an error; nothing is fetched.
docs: $(READY)
	PYTHONPATH=src:. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# A benchmark beside its peer: make bench NAME=update
bench: $(READY)
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

# torch first and pinned: left to the package's own requirement, pip may choose a build with gigabytes of CUDA.
$(READY): pyproject.toml plugins/rdma/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[hf,integrations,dev]' -e plugins/rdma
	touch $@
