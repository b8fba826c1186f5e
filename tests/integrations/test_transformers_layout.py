"""The layouts that Trainer refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import Trainer

from tests.integrations.plain_script import model
from tests.integrations.trainer_runs import arguments


class TestRefusedLayouts:
    """Errors before any optimizer exists; `tests/e2e/test_trainer_layouts.py` runs the supported layouts."""

    def refused(self, args, network=None):
        with pytest.raises(RuntimeError) as refusal:
            Trainer.get_optimizer_cls_and_kwargs(args, network)
        return str(refusal.value)

    @pytest.mark.parametrize("version", [None, "1"])
    def test_fsdp1_of_accelerate_launch(self, tmp_path, monkeypatch, version):
        args = arguments(tmp_path)
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        if version:  # else accelerate's own default, which is 1
            monkeypatch.setenv("FSDP_VERSION", version)
        message = self.refused(args, model())
        assert message.startswith("optim: muon does not run under FSDP version 1, which keeps flat slices")
        assert 'fsdp_config={"version": 2} in TrainingArguments' in message
        assert "accelerate launch --fsdp_version 2" in message

    def test_fsdp1_of_the_arguments(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers would set it as a side effect
        args = arguments(tmp_path, fsdp="full_shard auto_wrap", fsdp_config={"version": 1})
        assert "FSDP version 1" in self.refused(args, model())

    def test_tensor_parallel_in_plain_tensors(self, tmp_path):
        network = model()
        network._tp_size = 2
        assert "cuts matrices for 2 ranks into plain tensors" in self.refused(arguments(tmp_path), network)

    def test_deepspeed(self, tmp_path, monkeypatch):
        args = arguments(tmp_path)
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        assert Trainer.get_optimizer_cls_and_kwargs(args, model())
        args.deepspeed_plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"mics_shard_size": 2}})
        with pytest.raises(RuntimeError, match="does not run with this DeepSpeed config"):
            Trainer.get_optimizer_cls_and_kwargs(args, model())

    def test_megatron(self, tmp_path, monkeypatch):
        args = arguments(tmp_path)
        monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
        assert "does not run under Megatron-LM" in self.refused(args, model())

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"sp_size": 2}, "ParallelismConfig(sp_size) in this version of hf_muon without DeepSpeed"),
            ({"cp_size": 2}, "ParallelismConfig(cp_size) in this version of hf_muon"),
        ],
    )
    def test_parallel_sequences(self, tmp_path, sizes, message):
        args = arguments(tmp_path)
        args.parallelism_config = SimpleNamespace(**sizes)
        assert f"does not run under {message}" in self.refused(args, model())

    @pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
    def test_other_axes_are_not_refused(self, tmp_path, axis):
        args = arguments(tmp_path)
        args.parallelism_config = SimpleNamespace(**{f"{axis}_size": 2, "cp_size": 1, "sp_size": None})
        assert Trainer.get_optimizer_cls_and_kwargs(args, model())
