"""What a pretrained chat model is fine-tuned on: instructions, docstrings, and web text to remember.

The model is that of `make finetune`. Instructions and web text are two files of LLaMA-Factory's own data/, which this
repository does not have, because some of them are not for commercial use: `FILES` names them, and a folder that has
them is looked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evidence.corpus import BUILD, Corpus

ROOT = Path(__file__).resolve().parents[1]
INPUT = ROOT / "build" / "finetune" / "input"
COMMIT = "ff6d4d1"
FILES = {
    "alpaca_en_demo.json": "bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318",
    "c4_demo.jsonl": "f51528081ef22279f2840c02c4cd7cdfc372138be0817c5b8714d200af692b78",
}
FOLDER = "LLAMAFACTORY_DATA"
"""Name of the environment variable with the folder of `FILES`."""
MODEL = "model and docstrings"
CONTEXT = 96  # tokens: longer rows are left out, so that every answer is whole
HELD_OUT = 48  # rows of validation, and of web text in the test
TRAINED = 192  # instructions: each run of 24 steps of 8 reads all of them once; the test has those that are left


class Chat(Corpus):
    """Rows of questions and answers, of which only answers count, and blocks of web text."""

    def blocks(self, domain: str, part: str, context: int) -> Any:
        """Return int64 tokens and labels of a part, ``(number of rows, 2, context)``; -100 where nothing is learned."""
        import numpy as np
        import torch

        if context != CONTEXT:
            raise ValueError(f"context {context}: the rows of {self.folder.name} have {CONTEXT} tokens")
        flat = np.fromfile(self.folder / f"{domain}-{part}.i32", dtype=np.int32)
        return torch.from_numpy(flat.astype(np.int64)).view(-1, 2, CONTEXT)


def chat() -> Chat:
    """Return the rows, and make them first where they are missing.

    Raises:
        RuntimeError: a file of `FILES` is missing or another one, or the model cannot be made.
    """
    maker = ROOT / "examples" / "demo" / "smollm2.py"
    if subprocess.run([sys.executable, str(maker)], check=False).returncode:
        raise RuntimeError(f"{maker.relative_to(ROOT)} failed, as it says above")
    made_from = {
        "chat.py": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12],
        MODEL: json.loads((INPUT / "manifest.json").read_text(encoding="utf-8"))["content"],
    }
    folder = BUILD / f"chat-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]}"
    if not (folder / "manifest.json").is_file():
        _write(folder, made_from)
    return Chat(folder)


def corpus_in(folder: Path) -> Corpus:
    """Return the text of a folder that `chat` or `evidence.corpus.corpus` has made."""
    return (Chat if folder.name.startswith("chat-") else Corpus)(folder)


def _write(folder: Path, made_from: dict[str, str]) -> None:
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(INPUT / "model")
    folder.mkdir(parents=True, exist_ok=True)
    digest, counts = hashlib.sha256(made_from[MODEL].encode()), {}
    for (domain, part), rows in _parts(tokenizer).items():
        array = np.array(rows, dtype=np.int32)
        digest.update(array.tobytes())
        array.tofile(folder / f"{domain}-{part}.i32")
        counts[f"{domain}/{part}"] = int((array[:, 1] != -100).sum())
    manifest = {
        "name": digest.hexdigest()[:12],
        "vocab_size": len(tokenizer),
        "tokens": counts,
        "recipe": made_from,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _parts(tokenizer: Any) -> dict[tuple[str, str], list[Any]]:
    """Return the rows of each domain and part, each a pair of tokens and labels."""
    alpaca = json.loads(_file("alpaca_en_demo.json"))
    instructions = [("\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]) for row in alpaca]
    functions = {
        name: [(row["question"], row["answer"]) for row in json.loads((INPUT / "data" / f"{name}.json").read_text())]
        for name in ("train", "held_out")
    }
    texts = [json.loads(line)["text"] for line in _file("c4_demo.jsonl").decode().splitlines()]
    web = [row for text in texts if (row := text_row(tokenizer, text))]
    # A dict, because some are there twice, and would be trained on and tested.
    ours = list(rows_of(tokenizer, dict(instructions).items()))
    docs = list(rows_of(tokenizer, functions["train"]))
    return {
        ("alpaca", "train"): ours[HELD_OUT:][:TRAINED],
        ("alpaca", "validation"): ours[:HELD_OUT],
        ("alpaca", "test"): ours[HELD_OUT:][TRAINED:],
        ("docstrings", "train"): docs[HELD_OUT:],
        ("docstrings", "validation"): docs[:HELD_OUT],
        ("docstrings", "test"): list(rows_of(tokenizer, functions["held_out"])),
        ("web", "validation"): web[:HELD_OUT],
        ("web", "test"): web[HELD_OUT : 2 * HELD_OUT],
    }


def rows_of(tokenizer: Any, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield tokens and labels of each question and answer that `CONTEXT` tokens can hold."""
    for question, answer in pairs:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        said = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        missing = CONTEXT - len(asked) - len(said)
        if missing >= 0:  # the end is not masked from attention: no earlier token attends to it
            yield asked + said + missing * [tokenizer.pad_token_id], len(asked) * [-100] + said + missing * [-100]


def text_row(tokenizer: Any, text: str) -> tuple[list[int], list[int]] | None:
    """Return the first tokens of a text, all of which count; None if it is shorter."""
    ids = tokenizer(text, add_special_tokens=False).input_ids[:CONTEXT]
    return (ids, ids) if len(ids) == CONTEXT else None


def _file(name: str) -> bytes:
    path = Path(os.environ.get(FOLDER, BUILD / "llamafactory")) / name
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if found != FILES[name]:
        raise RuntimeError(
            f"{path}: {found}, not {FILES[name]}. It is data/{name} of https://github.com/hiyouga/LLaMA-Factory at "
            f"commit {COMMIT}: copy it there, or set {FOLDER} to the folder that has it"
        )
    return path.read_bytes()
