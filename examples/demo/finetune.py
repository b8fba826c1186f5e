"""Fine-tune a pretrained chat model with Muon through LLaMA-Factory, and ask it three questions before and after.

    python examples/demo/finetune.py

It reuses a finished run in build/finetune/, and resumes an interrupted one from its last checkpoint.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from prepare import ROOT
from smollm2 import BUILD, INPUT, prepare
from training import LOG, Result, Run, session

RUN = Run("Muon", ROOT / "examples" / "yaml" / "llamafactory_smollm2_sft.yaml", BUILD)
PICTURE = BUILD / "curves.png"
CURVES = {
    "loss": "cross-entropy per token (nats)",
    "muon/relative_update": "a step of a matrix, relative to it",
    "muon/orthogonality_error": "error of the orthogonalization",
}
QUESTIONS = 3
TOKENS = 48  # of an answer, at most


def main() -> None:
    with session(BUILD, "make finetune"):
        manifest = prepare()
        result = RUN.result(str(manifest["content"]))
        show_routes(ROOT / result.config["output_dir"] / LOG)
        draw(result)
        show_answers(ROOT / result.config["model_name_or_path"], ROOT / result.config["output_dir"])
    starts = [entry["eval_loss"] for entry in result.history if "eval_loss" in entry and entry["step"] == 0]
    before = f"{starts[0]:.3f} before, " if starts else ""  # none without eval_on_start
    print(
        f"\nheld-out loss: {before}{result.loss:.3f} after {result.config['max_steps']} steps in "
        f"{result.seconds:.0f} s (learning rate {result.config['learning_rate']:g}, one seed)\n"
        f"curves: {PICTURE.relative_to(ROOT)}\n"
        f"The file is {RUN.file.relative_to(ROOT)}. Its first lines name what you change in a\n"
        "copy of it, for `llamafactory-cli train COPY`. Whether Muon or AdamW is better for a pretrained model is\n"
        "another question: docs/learning-rate.md#is-it-worth-it"
    )


def show_routes(log: Path) -> None:
    """Print the table of routes that the run has logged."""
    table = re.search(
        r"parameter +shape .*?^.*?adamw: [^\n]*$", log.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    print(f"\n{table[0]}" if table else f"no table of routes in {log.relative_to(ROOT)}: another optimizer has run")


def draw(result: Result) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(CURVES), sharex=True, figsize=(8, 9), layout="constrained")
    for axes, (name, title) in zip(panels, CURVES.items(), strict=True):
        for key, style in ((name, {"marker": "."}), (f"eval_{name}", {"marker": "o", "label": "held out"})):
            points = [(entry["step"], entry[key]) for entry in result.history if key in entry]
            if points:
                axes.plot(*zip(*points, strict=True), **style)
        axes.set_title(f"{name}: {title}", fontsize="medium", loc="left")
        axes.grid(alpha=0.3)
    panels[0].legend()
    panels[-1].set_xlabel("step")
    figure.savefig(PICTURE, dpi=150)


def show_answers(start: Path, trained: Path) -> None:
    """Print what the models of two folders, before and after the training, answer to held-out questions."""
    rows = json.loads((INPUT / "data" / "held_out.json").read_text(encoding="utf-8"))[:QUESTIONS]
    questions = [row["question"] for row in rows]
    before, after = answers(start, questions), answers(trained, questions)
    for row, *both in zip(rows, before, after, strict=True):
        print(f"\n{row['question']}")
        for title, text in zip(("Python says", "before", "after"), (row["answer"], *both), strict=True):
            print(textwrap.fill(text, 110, initial_indent=f"  {title:<12} ", subsequent_indent=" " * 15))


def answers(model: Path, questions: list[str]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        words = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        found = network.generate(**words, max_new_tokens=TOKENS, do_sample=False)[0, words["input_ids"].size(1) :]
        texts.append(" ".join(tokenizer.decode(found, skip_special_tokens=True).split()))
    return texts


if __name__ == "__main__":
    main()
