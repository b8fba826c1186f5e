"""Text to train on: documentation and source code of packages whose versions the environment pins.

Each domain has three parts, which share no passage: `train`, `validation`, on which rates are tuned, and `test`, which
only final trials see. Whole modules are held out, and of a held-out module every passage that shares a line of 60
characters with the training part is removed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parents[1] / "build" / "evidence"
PARTS = ("train", "validation", "test")
VOCAB_SIZE = 2048
END = "<|endoftext|>"
HELD_OUT_ONE_IN = 12  # modules, for each held-out part
LONG_LINE = 60  # characters
SKIPPED = {"test", "tests", "testing", "_vendor", "__pycache__"}

Documents = dict[str, list[str]]
"""Passages of each document, by its name."""
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Domain:
    """One kind of text.

    Attributes:
        packages: whose modules are read, each module a document.
        passages: returns the passages of a module's source.
    """

    packages: tuple[str, ...]
    passages: Callable[[bytes], Iterable[str]]


def _docstrings(source: bytes) -> Iterator[str]:
    """Yield the paragraphs of a module's docstrings, in the order of the source."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, _Definition)]
    for node in (tree, *sorted(nodes, key=lambda node: node.lineno)):
        text = ast.get_docstring(node)
        for paragraph in re.split(r"\n\s*\n", text) if text else ():
            if len(paragraph.strip()) > 1:
                yield paragraph.strip("\n")


def _code(source: bytes) -> Iterator[str]:
    """Yield a module's functions and classes without comments and docstrings."""
    for node in ast.parse(source).body:
        if not isinstance(node, _Definition):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, _Definition) and ast.get_docstring(inner) is not None:
                inner.body = inner.body[1:] or [ast.Pass()]
        yield ast.unparse(node)


DOMAINS = {
    "docs": Domain(("torch", "transformers", "deepspeed", "datasets", "peft", "accelerate", "trl"), _docstrings),
    "code": Domain(("deepspeed", "datasets", "peft", "accelerate", "trl"), _code),
}


def split(documents: Documents) -> dict[str, list[str]]:
    """Return the texts of the documents of each part.

    A passage that repeats an earlier one of its own part is removed, and so is a held-out passage that shares a line of
    60 characters or more, or all of itself, with the training part, and one of the test part that shares them with
    validation. The name of a document decides its part.
    """
    by_part: dict[str, Documents] = {part: {} for part in PARTS}
    for name, passages in documents.items():
        by_part[part_of(name)][name] = passages
    texts: dict[str, list[str]] = {}
    earlier: set[str] = set()  # lines and passages of the parts before
    for part in PARTS:
        own: set[str] = set()
        remaining: list[list[str]] = []
        for passages in by_part[part].values():
            remaining.append([])
            for passage in passages:
                marks = _marks(passage)
                if passage.strip() not in own and not marks & earlier:
                    remaining[-1].append(passage)
                    own |= marks
        earlier |= own
        texts[part] = ["\n\n".join(passages) for passages in remaining if passages]
    return texts


def part_of(name: str) -> str:
    """Return the part of a document."""
    number = zlib.crc32(name.encode()) % HELD_OUT_ONE_IN
    return PARTS[number + 1] if number < 2 else PARTS[0]


def _marks(passage: str) -> set[str]:
    """Return what two parts must not share: the passage, and its long lines."""
    lines = {line.strip() for line in passage.splitlines()}
    return {passage.strip()} | {line for line in lines if len(line) >= LONG_LINE}


def read_documents(domain: Domain) -> Documents:
    """Return the passages of each module of a domain's packages, in a fixed order."""
    documents: Documents = {}
    for package in domain.packages:
        folder = _folder(package)
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder.parent)
            if SKIPPED & set(relative.parts):
                continue
            try:
                passages = list(domain.passages(path.read_bytes()))
            except SyntaxError:  # templates
                continue
            if passages:
                documents[relative.as_posix()] = passages
    return documents


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{package} is not installed, and the text of the studies comes from it: make evidence")
    return Path(next(iter(spec.submodule_search_locations)))


# --- tokens


def recipe() -> dict[str, str]:
    """Return what the tokens depend on: this file and the versions of the packages."""
    packages = sorted({package for domain in DOMAINS.values() for package in domain.packages} | {"tokenizers"})
    return {"corpus.py": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]} | {
        package: version(package) for package in packages
    }


class Corpus:
    """Tokens of all domains and parts.

    Attributes:
        name: a hash of all tokens.
        tokens: number of tokens by domain and part, `docs/train`.
        vocab_size: of the tokenizer.
        end: the token that ends a document.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self.name: str = manifest["name"]
        self.tokens: dict[str, int] = manifest["tokens"]
        self.recipe: dict[str, str] = manifest["recipe"]
        self.vocab_size: int = manifest["vocab_size"]
        self.end = 0

    def blocks(self, domain: str, part: str, context: int) -> Any:
        """Return int64 tokens of a part, ``(number of blocks, context)``; the incomplete last block is left out."""
        import numpy as np
        import torch

        flat = np.fromfile(self.folder / f"{domain}-{part}.u16", dtype=np.uint16)
        count = len(flat) // context
        return torch.from_numpy(flat[: count * context].astype(np.int64)).view(count, context)


def corpus() -> Corpus:
    """Return the tokens, and make them first where they are missing or packages have changed."""
    current = recipe()
    folder = BUILD / f"corpus-{hashlib.sha256(json.dumps(current).encode()).hexdigest()[:12]}"
    if not (folder / "manifest.json").is_file():
        print(f"making {folder.name} of documentation and code of {', '.join(list(current)[1:])}", file=sys.stderr)
        texts = {name: split(read_documents(domain)) for name, domain in DOMAINS.items()}
        write_corpus(folder, texts, current)
    return Corpus(folder)


def write_corpus(
    folder: Path, texts: dict[str, dict[str, list[str]]], made_from: dict[str, str], vocab_size: int = VOCAB_SIZE
) -> None:
    """Train a byte-level BPE on the training part of the first domain, and write the tokens of all parts."""
    import numpy as np
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(next(iter(texts.values()))["train"], trainer)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    digest, counts = hashlib.sha256(), {}
    for domain, parts in texts.items():
        for part, documents in parts.items():
            lines = (ids for text in documents for ids in (tokenizer.encode(text).ids, [0]))
            flat = np.fromiter((token for ids in lines for token in ids), dtype=np.uint16)
            digest.update(flat.tobytes())
            counts[f"{domain}/{part}"] = len(flat)
            flat.tofile(partial / f"{domain}-{part}.u16")
    tokenizer.save(str(partial / "tokenizer.json"))
    manifest = {
        "name": digest.hexdigest()[:12],
        "vocab_size": tokenizer.get_vocab_size(),
        "tokens": counts,
        "recipe": made_from,
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
