# Each target makes what it needs and can be run first.
#   make demo      a real training run with optim: muon, beside AdamW
#   make quick     tests of what needs torch and transformers alone, in one process, on the newest stack
#   make test      the first tier: what README promises, on the newest stack, with DeepSpeed, on the stack LLaMA-Factory allows, and
#                  what CUDA code becomes, without a GPU
#   make test-all  every test; `make rest` is what `make test` leaves out of it
#   make test-studies  tests of the benchmarks and of the harness of evidence/
#   make nightly   every test, with fresh Hypothesis examples
#   make mutants   which lines of a room no test would miss: ROOM=math, SAMPLE=12
#   make on-newest, on-deepspeed, on-llamafactory, on-cuda   the first tier on one stack
#   make test-versions  the first tier with other versions, in an environment that is deleted: TORCH=2.9.1, TRANSFORMERS=, DEEPSPEED=;
#                  without these, the oldest and the newest of each
#   make lint      ruff and mypy
#   make wheel     the wheel, in build/wheel; installed with what it requires alone it runs README's script, and with [cli] a command
#   make docs      the documentation as pages, in build/docs; warnings are errors
#   make bench     the benchmarks, beside other Muons; on a GPU with DEVICE=cuda, more options in BENCH
#   make gpu       what the first ten minutes on a card should run, and a page of results; with DEVICE=cpu at small sizes
#   make evidence   tables of the studies of Muon beside AdamW; with STUDY=name it runs or continues one, JOBS=2 two trials at once
#   make golden    the tables in tests/golden and the tables of options in docs/options.md, written anew: look at the diff

PYTHON ?= python3
# Other versions than the pinned ones, in environments of their own: 2.9.1, the `oldest` of pyproject.toml, or the `newest`.
# TRANSFORMERS=oldest and =newest take accelerate, peft and TRL along.
TORCH ?=
TRANSFORMERS ?=
DEEPSPEED ?=
OTHER := $(if $(TORCH),-torch-$(TORCH))$(if $(TRANSFORMERS),-transformers-$(TRANSFORMERS))$(if $(DEEPSPEED),-deepspeed-$(DEEPSPEED))
VENV := .venv$(OTHER)
LF := .venv-llamafactory$(OTHER)
DS := .venv-deepspeed$(OTHER)
PIN := $(PYTHON) tests/pin.py torch=$(TORCH) transformers=$(TRANSFORMERS) deepspeed=$(DEEPSPEED)
BENCHMARKS := .venv-bench
CUDA := .venv-cuda
DEVICE ?= cpu
JOBS ?= 1
PIP := -m pip install --quiet --disable-pip-version-check
# LLaMA-Factory pins versions that have moved on since; these are known to work.
LF_ENV := DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
# Whole files, because the tests of a file share ranks, or runs that others are compared with. A crash inside of torch or gloo (once in some
# ten thousand cases) is tried once more, and the summary counts it. In CI, no test of the pinned versions may skip.
PYTEST := -m pytest -n 2 --dist loadfile --durations 20 --reruns 1 --only-rerun "ended with SIG(ABRT|SEGV)" \
	$(if $(CI),$(if $(OTHER),,--no-skips))

# A tier is chosen by marks; pyproject.toml describes them.
TIER ?= first
MARKS_first := not gpu and not extended
MARKS_rest := not gpu and extended
MARKS_all := not gpu
MARKS = $(MARKS_$(TIER))
# Tests that the newest stack leaves to others.
ELSEWHERE := --ignore tests/cuda --ignore tests/studies --ignore tests/e2e/test_deepspeed.py

.PHONY: install async_io chromium demo quick test rest test-all test-studies nightly mutants on-newest on-deepspeed on-llamafactory on-cuda
.PHONY: test-versions wheel lint docs golden bench gpu evidence clean

# The longest first: compiling takes the time in which others wait for downloads.
install: $(DS)/.made async_io $(VENV)/.made $(LF)/.made $(CUDA)/.made chromium

# These two know themselves whether they are done. What fails is tried again by the next make.
async_io: $(DS)/.made
	@tests/deepspeed/build_async_io $(DS) || echo "== no async_io: tests of NVMe offload skip, and fail in CI"

chromium: $(VENV)/.made
	@tests/get_chromium $(VENV) || echo "== no browser: the test that opens a page skips, and fails in CI"

$(VENV)/.made: pyproject.toml constraints.txt
	@echo "== making $(VENV): the newest supported stack (some minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIN) constraints.txt >$(VENV)/constraints.txt
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt torch
	$(VENV)/bin/python $(PIP) -c $(VENV)/constraints.txt -e ".[test,lint,docs,trl,cli,browser]"
	@touch $@

$(LF)/.made: pyproject.toml constraints-llamafactory.txt requirements-llamafactory.txt
	@echo "== making $(LF): LLaMA-Factory 0.9.5 and what it allows (some minutes)"
	$(PYTHON) -m venv $(LF)
	$(PIN) constraints-llamafactory.txt >$(LF)/constraints.txt
	$(LF)/bin/python $(PIP) -c $(LF)/constraints.txt torch
	$(LF)/bin/python $(PIP) -c $(LF)/constraints.txt -r requirements-llamafactory.txt
	$(LF)/bin/python $(PIP) --no-deps llamafactory==0.9.5
	$(LF)/bin/python $(PIP) -c $(LF)/constraints.txt -e ".[test,deepspeed,cli]"
	# LLaMA-Factory imports torchaudio, which text training never uses and which has no CPU build.
	@touch "$$($(LF)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py"
	@touch $@

$(DS)/.made: pyproject.toml constraints-deepspeed.txt
	@echo "== making $(DS): the newest supported stack with DeepSpeed (some minutes)"
	$(PYTHON) -m venv $(DS)
	$(PIN) constraints-deepspeed.txt >$(DS)/constraints.txt
	$(DS)/bin/python $(PIP) -c $(DS)/constraints.txt torch
	$(DS)/bin/python $(PIP) -c $(DS)/constraints.txt -e ".[test,deepspeed]"
	@touch $@

$(CUDA)/.made: pyproject.toml constraints-cuda.txt
	@echo "== making $(CUDA): the newest supported stack with Triton (some minutes)"
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python $(PIP) -c constraints-cuda.txt torch triton
	$(CUDA)/bin/python $(PIP) -c constraints-cuda.txt -e ".[test]"
	@touch $@

$(BENCHMARKS)/.made: pyproject.toml constraints-bench.txt
	@echo "== making $(BENCHMARKS): the newest supported stack, with other Muons (some minutes)"
	$(PYTHON) -m venv $(BENCHMARKS)
	$(BENCHMARKS)/bin/python $(PIP) -c constraints-bench.txt torch
	$(BENCHMARKS)/bin/python $(PIP) -c constraints-bench.txt -e ".[deepspeed,test]"
	@# A file or two of each is all that is measured.
	$(BENCHMARKS)/bin/python $(PIP) --no-deps llamafactory==0.9.5 gram-newton-schulz==0.1.6
	@touch $@

test-studies: $(VENV)/.made
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) tests/studies

nightly: export HYPOTHESIS_PROFILE := nightly
nightly: test-all test-studies

mutants: $(VENV)/.made
	$(VENV)/bin/python $(PIP) "cosmic-ray>=8"
	$(VENV)/bin/python -m tests.mutants $(ROOM) $(if $(SAMPLE),--sample $(SAMPLE))

bench: $(BENCHMARKS)/.made
	$(BENCHMARKS)/bin/python -m benchmarks.bench --device $(DEVICE) $(BENCH)

gpu: DEVICE = cuda
gpu: $(BENCHMARKS)/.made
	$(BENCHMARKS)/bin/python -m benchmarks.gpu --device $(DEVICE) $(GPU)

demo: $(LF)/.made
	$(LF_ENV) $(LF)/bin/python examples/demo/run.py

evidence: $(LF)/.made
	$(LF_ENV) $(LF)/bin/python -W ignore -m evidence $(if $(STUDY),run $(STUDY) --jobs $(JOBS),draw) $(EVIDENCE)

quick: $(VENV)/.made
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m "$(MARKS_first) and not slow and not llamafactory" $(ELSEWHERE)

test: TIER := first
rest: TIER := rest
test-all: TIER := all
test rest test-all:
	@$(MAKE) --no-print-directory -j3 install
	@$(MAKE) --no-print-directory -j1 -o async_io -o chromium on-newest on-deepspeed on-llamafactory on-cuda TIER=$(TIER)

# One stack alone, for a CI that runs them beside each other.
on-newest: $(VENV)/.made chromium
	@echo "== the newest stack"
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m "$(MARKS) and not llamafactory" $(ELSEWHERE)

on-deepspeed: $(DS)/.made async_io
	@echo "== DeepSpeed"
	DS=$(abspath $(DS)) && . tests/deepspeed/async_io_env && \
		OMP_NUM_THREADS=1 $(DS)/bin/python $(PYTEST) -m "$(MARKS)" tests/deepspeed tests/e2e/test_deepspeed.py

# What depends on the versions that LLaMA-Factory allows; all stacks have the same torch.
on-llamafactory: $(LF)/.made
	@echo "== the stack of LLaMA-Factory 0.9.5"
	OMP_NUM_THREADS=1 $(LF_ENV) $(LF)/bin/python $(PYTEST) -m "$(MARKS) and not newest" \
		tests/integrations tests/routing tests/refusals tests/e2e tests/test_autoload.py --ignore tests/e2e/test_deepspeed.py
	OMP_NUM_THREADS=1 $(LF_ENV) $(LF)/bin/python $(PYTEST) -m "$(MARKS) and (every_deepspeed or llamafactory)" \
		tests/deepspeed tests/convert || [ $$? = 5 ]  # 5: the rest has none

on-cuda: $(CUDA)/.made
	@echo "== CUDA, without a GPU"
	OMP_NUM_THREADS=1 $(CUDA)/bin/python $(PYTEST) -m "$(MARKS)" tests/cuda

# With another DeepSpeed the stack that has DeepSpeed, else the newest. An interrupted run deletes its environment, too.
VERSIONS := TORCH=oldest TORCH=newest TRANSFORMERS=oldest TRANSFORMERS=newest DEEPSPEED=oldest DEEPSPEED=newest
test-versions:
ifeq ($(OTHER),)
	@failed=; for version in $(VERSIONS); do \
		$(MAKE) --no-print-directory test-versions $$version || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "== failed:$$failed"; exit 1; }
else
	@trap 'rm -rf $(VENV) $(DS)' EXIT; trap 'exit 130' INT TERM; echo "== $(OTHER:-%=%)"; \
	$(MAKE) --no-print-directory $(if $(DEEPSPEED),on-deepspeed,on-newest)
endif

# From a copy: setuptools also packs what earlier builds left in build/lib and listed in hf_muon.egg-info.
wheel: export PYTHONPATH =
wheel:
	rm -rf build/wheel
	mkdir -p build/wheel/source
	git ls-files -z | tar -c --null -T - | tar -x -C build/wheel/source
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel build/wheel/source
	$(PIN) constraints.txt >build/wheel/constraints.txt
	build/wheel/venv/bin/python $(PIP) -c build/wheel/constraints.txt build/wheel/*.whl
	sed -n '/^```python/,/^```$$/{//!p}' README.md >build/wheel/script.py
	cd build/wheel && venv/bin/python script.py
	build/wheel/venv/bin/python $(PIP) -c build/wheel/constraints.txt "$$(echo build/wheel/*.whl)[cli]"
	build/wheel/venv/bin/hf-muon inspect qwen3-0.6b
	rm -rf build/wheel/venv build/wheel/source build/wheel/out

lint: $(VENV)/.made
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.made
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going -q docs build/docs
	@echo "== build/docs/index.html"

golden: $(VENV)/.made $(LF)/.made
	$(VENV)/bin/python -m tests.messages
	$(VENV)/bin/python -m tests.option_table
	$(VENV)/bin/python -m pytest -q -m "not gpu and not llamafactory" --golden tests --ignore tests/e2e
	$(LF_ENV) $(LF)/bin/python -m pytest -q -m "not gpu" --golden tests/routing/test_golden.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
