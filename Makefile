# Each target makes the environments that it needs. The first time that takes minutes.
#   make demo          train a small model with Muon and with AdamW
#   make finetune      fine-tune a pretrained chat model with Muon, and ask it before and after
#   make test          the first tier of tests: everything that README promises
#   make quick         those of them that need one process and only torch and transformers
#   make rest          the second tier; `.ci/run` runs both
#   make real          a pretrained model in all programs, a quarter of an hour to an hour, by the processor; `make nightly` runs it, too
#   make lint          ruff, mypy, and words to avoid
#   make docs          the documentation as a site, in build/docs; warnings are errors
#   make golden        rewrite the tables in tests/golden and the generated pages: look at the diff
#   make wheel         build sdist and wheel in build/wheel, check them, install the wheel and run README's script
#   make bench         compare speed with other Muons; DEVICE=cuda, more options in BENCH
#   make gpu           check and measure on a GPU, ten minutes at most, one page of results; DEVICE=cpu at small sizes
#   make evidence      write the tables of the studies; STUDY=name runs one or continues it, JOBS=2 two trials at once
#   make on-newest, on-deepspeed, on-llamafactory, on-older-deepspeed, on-cuda    one part of it; TIER=rest, nightly or all
#   make flaky         each part five times on a busy machine, and what differed; TIMES=2, TIER=rest, PARTS="on-newest"
#   make test-studies  tests of benchmarks/ and evidence/
#   make nightly       every test, with new Hypothesis examples; `make test-all` with the usual ones
#   make mutants       lines that no test checks: ROOM=math, SAMPLE=12
#   make test-versions the first tier with other versions: TORCH=2.9.1, TRANSFORMERS=, DEEPSPEED=; without any, the oldest and newest of each

PYTHON ?= python3
# A version, `oldest` (the lower bound in pyproject.toml) or `newest` (not pinned). TRANSFORMERS=oldest and =newest also choose accelerate, peft
# and TRL. Each combination has its own environments.
TORCH ?=
TRANSFORMERS ?=
DEEPSPEED ?=
OTHER := $(if $(TORCH),-torch-$(TORCH))$(if $(TRANSFORMERS),-transformers-$(TRANSFORMERS))$(if $(DEEPSPEED),-deepspeed-$(DEEPSPEED))
VENV := .venv$(OTHER)
LF := .venv-llamafactory$(OTHER)
CUDA := .venv-cuda
BENCHMARKS := .venv-bench
PIN := $(PYTHON) scripts/pin.py torch=$(TORCH) transformers=$(TRANSFORMERS) deepspeed=$(DEEPSPEED)
DEVICE ?= cpu
JOBS ?= 1
# Python compiles what it imports, once; pip would compile all of it, which takes longer than the downloads. "false" is pip's yes.
export PYTHONDONTWRITEBYTECODE :=
export PIP_NO_COMPILE := false
PIP := -m pip install --quiet --disable-pip-version-check
# What torch's build for CUDA pins.
TRITON := triton==3.7.1
# LLaMA-Factory checks for older versions; the pinned ones work.
LF_ENV := DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
# Tests of a file share ranks and reference runs, so a file stays whole. tests/conftest.py puts the longest ones first. A crash inside of torch or gloo (one in some ten thousand cases) is tried
# once more, and the summary counts it. In CI, no test of the pinned versions may skip.
PYTEST = -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20 --reruns 1 --only-rerun "ended with SIG(ABRT|SEGV)" \
	$(if $(CI),$(if $(OTHER),,--no-skips)) $(if $(OUTCOMES),--junitxml $(OUTCOMES)/$@.xml)

# Marks choose a tier; pyproject.toml describes them.
TIER ?= first
MARKS_first := not gpu and not extended and not nightly
MARKS_rest := not gpu and extended and not nightly
MARKS_nightly := not gpu and nightly
MARKS_all := not gpu
MARKS = $(MARKS_$(TIER))
# What others of these parts run. DeepSpeed's tests switch torch.compile off in their processes.
ELSEWHERE := --ignore tests/real --ignore tests/cuda --ignore tests/studies --ignore tests/deepspeed --ignore tests/e2e/test_deepspeed.py
PARTS_first := on-newest on-deepspeed on-llamafactory on-older-deepspeed
PARTS_rest := $(PARTS_first) on-cuda
PARTS_nightly := $(PARTS_rest) real
PARTS_all := $(PARTS_nightly)
PARTS = $(PARTS_$(TIER))

.PHONY: install async_io demo finetune quick test rest real test-all test-studies nightly flaky mutants
.PHONY: on-newest on-deepspeed on-llamafactory on-older-deepspeed on-cuda test-versions dist wheel lint docs golden bench gpu evidence clean

# --- environments

# $(call environment,CONSTRAINTS,PACKAGES): torch and PACKAGES first, because building DeepSpeed imports torch.
define environment
	@echo "== making $(@D) (some minutes)"
	$(PYTHON) -m venv $(@D)
	$(if $(EXACT),cat,$(PIN)) constraints/$(1).txt >$(@D)/constraints.txt
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt torch $(2)
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt -e ".[$(EXTRAS)]"
endef

# The longest first: compiling takes the time in which others wait for downloads.
install: $(VENV)/.made async_io $(LF)/.made

$(VENV)/.made: EXTRAS := test,dev,report,deepspeed
$(VENV)/.made: pyproject.toml constraints/newest.txt
	$(call environment,newest)
	@touch $@

$(CUDA)/.made: EXTRAS := test
$(CUDA)/.made: EXACT := yes
$(CUDA)/.made: pyproject.toml constraints/newest.txt
	$(call environment,newest,$(TRITON))
	@touch $@

$(BENCHMARKS)/.made: EXTRAS := deepspeed,test
$(BENCHMARKS)/.made: EXACT := yes
$(BENCHMARKS)/.made: pyproject.toml constraints/newest.txt
	$(call environment,newest)
	@# Of each, only a file or two is measured.
	$(@D)/bin/python $(PIP) --no-deps llamafactory==0.9.5 gram-newton-schulz==0.1.6 pytorch_optimizer==4.1.0
	@touch $@

$(LF)/.made: EXTRAS := test,deepspeed,report
$(LF)/.made: pyproject.toml constraints/llamafactory.txt constraints/llamafactory-requirements.txt
	$(call environment,llamafactory,-r constraints/llamafactory-requirements.txt)
	$(@D)/bin/python $(PIP) --no-deps llamafactory==0.9.5
	@# LLaMA-Factory imports torchaudio, which text training never uses and which has no CPU build.
	@touch "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py"
	@touch $@

# This one checks itself whether it is done. If it fails, the next make tries again.
async_io: $(VENV)/.made
	@tests/deepspeed/build_async_io $(VENV) || echo "== no async_io: tests of NVMe offload skip, and fail in CI"

# --- tests

quick: $(VENV)/.made
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m "$(MARKS_first) and not slow and not llamafactory" $(ELSEWHERE)

test: TIER := first
rest: TIER := rest
test-all nightly: TIER := all
nightly: export HYPOTHESIS_PROFILE := nightly
test rest test-all nightly:
	@$(MAKE) --no-print-directory -j3 install
	@$(MAKE) --no-print-directory -j1 -o async_io $(PARTS) TIER=$(TIER)

on-newest: $(VENV)/.made
	@echo "== the newest stack"
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m "$(MARKS) and not llamafactory" $(ELSEWHERE)

on-deepspeed: $(VENV)/.made async_io
	@echo "== DeepSpeed"
	DS=$(abspath $(VENV)) && . tests/deepspeed/async_io_env && \
		OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m "$(MARKS)" tests/deepspeed tests/e2e/test_deepspeed.py

# What depends on the versions that LLaMA-Factory allows; all environments have the same torch.
on-llamafactory: $(LF)/.made
	@echo "== the stack of LLaMA-Factory 0.9.5"
	OMP_NUM_THREADS=1 $(LF_ENV) $(LF)/bin/python $(PYTEST) -m "$(MARKS) and (llamafactory or every_stack)" \
		tests/integrations tests/routing/test_golden.py tests/refusals tests/e2e --ignore tests/e2e/test_deepspeed.py

on-older-deepspeed: $(LF)/.made
	@echo "== DeepSpeed 0.18.4"
	OMP_NUM_THREADS=1 $(LF_ENV) $(LF)/bin/python $(PYTEST) -m "$(MARKS) and every_stack" tests/deepspeed || [ $$? = 5 ]  # 5: no test of this tier

on-cuda: $(CUDA)/.made
	@echo "== CUDA, without a GPU"
	OMP_NUM_THREADS=1 $(CUDA)/bin/python $(PYTEST) -m "$(MARKS)" tests/cuda

real: $(VENV)/.made $(LF)/.gguf
	@echo "== a pretrained model"
	$(LF_ENV) $(LF)/bin/python examples/demo/smollm2.py
	OMP_NUM_THREADS=1 $(LF_ENV) $(LF)/bin/python $(PYTEST) tests/real
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) tests/real

TIMES ?= 5
BUSY ?= 2
flaky:
	@$(MAKE) --no-print-directory -j3 install
	$(VENV)/bin/python -m scripts.flaky --tier $(TIER) --times $(TIMES) --busy $(BUSY) $(PARTS)

test-studies: $(VENV)/.made
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) tests/studies

mutants: $(VENV)/.made
	$(VENV)/bin/python $(PIP) "cosmic-ray>=8"
	$(VENV)/bin/python -m scripts.mutants $(ROOM) $(if $(SAMPLE),--sample $(SAMPLE))

# With another DeepSpeed its tests, else all. The environment is deleted afterwards, also when interrupted.
VERSIONS := TORCH=oldest TORCH=newest TRANSFORMERS=oldest TRANSFORMERS=newest DEEPSPEED=oldest DEEPSPEED=newest
test-versions:
ifeq ($(OTHER),)
	@failed=; for version in $(VERSIONS); do \
		$(MAKE) --no-print-directory test-versions $$version || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "== failed:$$failed"; exit 1; }
else
	@trap 'rm -rf $(VENV)' EXIT; trap 'exit 130' INT TERM; echo "== $(OTHER:-%=%)"; \
	$(MAKE) --no-print-directory $(if $(DEEPSPEED),on-deepspeed,on-newest)
endif

# --- programs

demo: $(LF)/.made
	$(LF_ENV) $(LF)/bin/python examples/demo/run.py

# gguf reads the file of weights.
$(LF)/.gguf: $(LF)/.made
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt gguf==0.19.0
	@touch $@

finetune: $(LF)/.gguf
	$(LF_ENV) $(LF)/bin/python examples/demo/finetune.py

evidence: $(if $(filter pretrained,$(STUDY)),$(LF)/.gguf,$(LF)/.made)
	$(LF_ENV) $(LF)/bin/python -W ignore -m evidence $(if $(STUDY),run $(STUDY) --jobs $(JOBS),draw) $(EVIDENCE)

bench: $(BENCHMARKS)/.made
	$(BENCHMARKS)/bin/python -m benchmarks.bench --device $(DEVICE) $(BENCH)

gpu: DEVICE = cuda
gpu: $(BENCHMARKS)/.made
	$(BENCHMARKS)/bin/python -m benchmarks.gpu --device $(DEVICE) $(GPU)

# --- the repository

lint: $(VENV)/.made
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python scripts/english.py

docs: $(VENV)/.made
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going -q docs build/docs
	@echo "== build/docs/index.html"

golden: $(VENV)/.made $(LF)/.made
	$(VENV)/bin/python -m scripts.messages
	$(VENV)/bin/python -m scripts.option_table
	$(VENV)/bin/python -m pytest -q -m "not gpu and not llamafactory" --golden tests --ignore tests/e2e
	$(LF_ENV) $(LF)/bin/python -m pytest -q -m "not gpu" --golden tests/routing/test_golden.py

# From a copy, because setuptools also packs what earlier builds left in build/lib and listed in hf_muon.egg-info. The package
# index shows README without the repository, so that the copy's has complete links.
dist: export PYTHONPATH =
dist:
	rm -rf build/wheel
	mkdir -p build/wheel/source
	git ls-files -z | tar -c --null -T - | tar -x -C build/wheel/source
	$(PYTHON) scripts/release.py readme build/wheel/source
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python $(PIP) build==1.6.1 twine==7.0.0 "readme_renderer[md]==46.0"
	build/wheel/venv/bin/python -m build --outdir build/wheel build/wheel/source >build/wheel/log
	build/wheel/venv/bin/python -m twine check --strict build/wheel/hf_muon-*
	rm -rf build/wheel/venv build/wheel/source

# `make -o dist wheel` tries the wheel that is in build/wheel.
wheel: export PYTHONPATH =
wheel: dist
	$(PYTHON) -m venv build/wheel/venv
	$(PIN) constraints/newest.txt >build/wheel/constraints.txt
	build/wheel/venv/bin/python $(PIP) -c build/wheel/constraints.txt build/wheel/*.whl
	build/wheel/venv/bin/python scripts/smoke.py
	build/wheel/venv/bin/hf-muon inspect qwen3-0.6b
	rm -rf build/wheel/venv

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
