"""A training file from a stranger: commands that read it run nothing that it names."""

from __future__ import annotations

import json

import pytest

from tests.cli.calls import call

OBJECT = "!!python/object/apply:os.mkdir [{proof}]"


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_objects_of_yaml_are_not_made(command, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {OBJECT.format(proof=tmp_path / 'ran')}\noptim: muon\noutput_dir: out\n")
    result = call(command, file)
    assert result.exit_code == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_file_cannot_have_the_code_of_a_model_run(command, tmp_path, monkeypatch):
    """Only the option of the command line can; the file's own `trust_remote_code` is for the training."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "remote"
    model.mkdir()
    auto_map = {"AutoConfig": "net.NetConfig", "AutoModelForCausalLM": "net.Net"}
    (model / "config.json").write_text(json.dumps({"model_type": "net_of_mine", "auto_map": auto_map}))
    (model / "net.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    file = tmp_path / "run.yaml"
    settings = {"model_name_or_path": str(model), "trust_remote_code": True, "optim": "muon", "output_dir": "out"}
    file.write_text(json.dumps(settings))
    result = call(command, file)
    assert result.exit_code == 1
    assert not (tmp_path / "ran").exists()
