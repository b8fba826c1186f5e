"""Build what the demo trains with: text, a tokenizer, a small Qwen3 and a LLaMA-Factory data set.

    python examples/demo/prepare.py

All text comes from the documentation of the running Python. The result is the folder build/demo/input/, which is
reused once it is complete; an interrupted run leaves no folder of that name.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import platform
import random
import shutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "demo"
INPUT = BUILD / "input"
MANIFEST = "manifest.json"

SEED = 42
VOCAB_SIZE = 4096
CONTEXT = 256
HELD_OUT_ONE_IN = 19  # modules
TOPIC = "topic "
END, PAD = "<|endoftext|>", "<|pad|>"

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
SKIPPED_FOLDERS = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prepare() -> dict[str, Any]:
    """Return the manifest of build/demo/input, building the folder first where it is missing or outdated."""
    own = f"Python {platform.python_version()}'s own documentation"
    print(f"{INPUT.relative_to(ROOT)}: a model and texts from {own}", flush=True)
    manifest = reuse_or_build(INPUT, recipe(__file__, "tokenizers", "torch", "transformers"), _build)
    print(
        f"  {manifest['train_documents']} documents to train on, {manifest['held_out_documents']} held out, "
        f"{manifest['train_tokens']:,} and {manifest['held_out_tokens']:,} tokens; "
        f"model with {manifest['parameters']:,} parameters",
        flush=True,
    )
    return manifest


def reuse_or_build(folder: Path, recipe: dict[str, str], build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest of a folder, and build it first where it is missing or of another recipe."""
    if (found := _manifest(folder))["recipe"] == recipe:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := _manifest(folder))["recipe"] == recipe:  # another process has built it meanwhile
            return found
        return _build_whole(folder, recipe, build)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"recipe": None}
    return content


def _build_whole(folder: Path, recipe: dict[str, str], build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Build a folder under another name, so that it is whole once it has its own, and return its manifest."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    manifest = {"recipe": recipe, **build(partial)}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return manifest


def recipe(file: str, *packages: str) -> dict[str, str]:
    """Return what a folder depends on: the code that builds it, and the versions of Python and of packages."""
    try:
        versions = {name: version(name) for name in packages}
    except PackageNotFoundError as error:
        sys.exit(
            f"{error.name} is not installed for {sys.executable}: install it there, or run `make demo` or "
            "`make finetune`, which install what they need"
        )
    return {
        "file": hashlib.sha256(Path(file).read_bytes() + Path(__file__).read_bytes()).hexdigest(),
        "python": platform.python_version(),
        **versions,
    }


def _build(folder: Path) -> dict[str, Any]:
    documents = collect_documents()
    held_out = [text for name, text in documents.items() if is_held_out(name)]
    train = [text for name, text in documents.items() if not is_held_out(name)]
    random.Random(SEED).shuffle(train)  # so that the order of the blocks is not alphabetical

    tokenizer = train_tokenizer(train)
    model = build_model(tokenizer)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    texts = {
        name: [{"text": text} for text in documents] for name, documents in (("train", train), ("held_out", held_out))
    }
    write_data(folder / "data", "demo", texts, {"prompt": "text"})
    return {
        "content": content_hash(folder),
        "train_documents": len(train),
        "train_tokens": sum(len(ids) + 1 for ids in tokenizer(train).input_ids),
        "held_out_documents": len(held_out),
        "held_out_tokens": sum(len(ids) + 1 for ids in tokenizer(held_out).input_ids),
        "parameters": model.num_parameters(),
    }


def is_held_out(name: str) -> bool:
    # The name decides, so that a module that another Python adds does not change the set of any other module. Topics
    # are never held out, because they repeat each other's contents.
    return not name.startswith(TOPIC) and zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def content_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# --- text


def collect_documents() -> dict[str, str]:
    """Return a document for each module and each pydoc topic, by name, in a fixed order, without repeated passages."""
    earlier: set[str] = set()

    def is_new(passage: str) -> bool:
        new = passage not in earlier
        earlier.add(passage)
        return new

    documents = {}
    for path in module_files():
        passages = [f"{heading}\n{text}" for heading, text in docstrings(path) if is_new(text)]
        documents[module_name(path)] = "\n\n".join(passages)
    for name in sorted(topics):
        documents[TOPIC + name] = "\n\n".join(filter(is_new, topics[name].strip().split("\n\n")))
    return {name: text for name, text in documents.items() if text}


def module_files() -> list[Path]:
    return sorted(path for path in LIBRARY.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(LIBRARY).parts))


def module_name(path: Path) -> str:
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a module, its classes and functions, each with a heading, in source order."""
    tree = ast.parse(path.read_bytes())
    if docstring := ast.get_docstring(tree):
        yield f"module {module_name(path)}:", docstring.strip()
    definitions = [node for node in ast.walk(tree) if isinstance(node, Definition)]
    for node in sorted(definitions, key=lambda node: node.lineno):
        if docstring := ast.get_docstring(node):
            yield _heading(node), docstring.strip()


def _heading(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):"
    return f"def {node.name}({ast.unparse(node.args)}):"


# --- tokenizer, model, data


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast  # here, because it is slow and not needed to reuse a folder

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)  # type: ignore[no-untyped-call]


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,  # as in the small Qwen3 models
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(config)


def write_data(folder: Path, prefix: str, sets: dict[str, list[dict[str, str]]], columns: dict[str, str]) -> None:
    """Write data sets as LLaMA-Factory reads them: one file each, and dataset_info.json, which names their columns."""
    folder.mkdir()
    for name, rows in sets.items():
        write_json(folder / f"{name}.json", rows)
    info = {f"{prefix}_{name}": {"file_name": f"{name}.json", "columns": columns} for name in sets}
    write_json(folder / "dataset_info.json", info)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    prepare()
