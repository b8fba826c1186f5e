"""Held-out text never appears in training: not a document, not a passage, not a long line."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from evidence.corpus import DOMAINS, LONG_LINE, PARTS, Corpus, Domain, part_of, read_documents, split, write_corpus


def long_lines(texts):
    return {line.strip() for text in texts for line in text.splitlines() if len(line.strip()) >= LONG_LINE}


def passages(texts):
    return {passage.strip() for text in texts for passage in text.split("\n\n")}


@pytest.fixture
def documents():
    """Return documents that repeat passages and lines of one another, as those of real packages do."""
    rng = random.Random(0)
    lines = [" ".join(rng.choices(["value", "tensor", "the", "of", "rows"], k=rng.randint(3, 25))) for _ in range(400)]
    return {
        f"module{i}.py": ["\n".join(rng.choices(lines, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 5))]
        for i in range(200)
    }


def test_parts_share_no_passage_and_no_long_line(documents):
    texts = split(documents)
    for one, other in itertools.combinations(PARTS, 2):
        assert not passages(texts[one]) & passages(texts[other])
        assert not long_lines(texts[one]) & long_lines(texts[other])
    counts = {part: sum(part_of(name) == part for name in documents) for part in PARTS}
    assert counts["train"] > 8 * max(counts["validation"], counts["test"]) > 0
    # Without the rule they do share lines.
    by_part = {part: [t for n, ps in documents.items() if part_of(n) == part for t in ps] for part in PARTS}
    assert long_lines(by_part["train"]) & long_lines(by_part["test"])


@pytest.mark.parametrize("name", DOMAINS)
def test_parts_of_an_installed_package_share_no_long_line(name):
    texts = split(read_documents(Domain(("peft",), DOMAINS[name].passages)))
    assert not (long_lines(texts["validation"]) | long_lines(texts["test"])) & long_lines(texts["train"])
    assert min(sum(map(len, texts[part])) for part in PARTS) > 1_000


def test_tokens_are_the_texts_and_the_tokenizer_has_seen_the_training_part_alone(documents, tmp_path):
    texts = {"docs": split(documents)}
    write_corpus(tmp_path / "both", texts, {"torch": "1"}, vocab_size=300)
    corpus = Corpus(tmp_path / "both")
    tokenizer = Tokenizer.from_file(str(tmp_path / "both" / "tokenizer.json"))
    for part in PARTS:
        flat = np.fromfile(tmp_path / "both" / f"docs-{part}.u16", dtype=np.uint16)
        assert corpus.tokens[f"docs/{part}"] == len(flat)
        decoded = tokenizer.decode(flat.tolist(), skip_special_tokens=False).split("<|endoftext|>")
        assert decoded == [*texts["docs"][part], ""]
        assert corpus.blocks("docs", part, 16).flatten().tolist() == flat[: len(flat) // 16 * 16].tolist()
    texts["docs"]["test"] = ["something else"]
    write_corpus(tmp_path / "other", texts, {"torch": "1"}, vocab_size=300)
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == (tmp_path / "both" / "tokenizer.json").read_bytes()
    assert Corpus(tmp_path / "other").name != corpus.name


def test_passages_of_documentation_and_of_code():
    source = b'"""First.\n\nSecond\nparagraph."""\n\nX = 1  # no\n\ndef f(a):\n    """Third."""\n    return a\n'
    assert list(DOMAINS["docs"].passages(source)) == ["First.", "Second\nparagraph.", "Third."]
    assert list(DOMAINS["code"].passages(source)) == ["def f(a):\n    return a"]
