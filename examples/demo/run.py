"""Train the same small model with AdamW and with Muon through LLaMA-Factory, and compare the two.

    python examples/demo/run.py

It reuses finished runs in build/demo/, and resumes interrupted ones from their last checkpoint. The terminal shows a
line of progress for each run, and all messages of a run are in its output.log.
"""

from __future__ import annotations

import math

from prepare import BUILD, ROOT, prepare
from training import Result, Run, session, tokens_per_step

YAML = ROOT / "examples" / "yaml"
RUNS = {label: Run(label, YAML / f"llamafactory_qwen3_demo_{label.lower()}.yaml", BUILD) for label in ("AdamW", "Muon")}
PICTURE = BUILD / "curves.png"
COLORS = {"AdamW": "tab:blue", "Muon": "tab:orange"}


def main() -> None:
    with session(BUILD, "make demo"):
        manifest = prepare()
        results = {label: run.result(str(manifest["content"])) for label, run in RUNS.items()}
    draw(results, int(str(manifest["parameters"])))
    report(results, int(str(manifest["parameters"])))


def draw(results: dict[str, Result], parameters: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, result in results.items():
        train = [(entry["step"], entry["loss"]) for entry in result.history if "loss" in entry]
        held_out = [(entry["step"], entry["eval_loss"]) for entry in result.history if "eval_loss" in entry]
        title = f"{label}, learning rate {result.config['learning_rate']:g}"
        axes.plot(*zip(*train, strict=True), color=COLORS[label], alpha=0.45, linewidth=1, label=f"{title}: training")
        axes.plot(
            *zip(*held_out, strict=True),
            color=COLORS[label],
            marker="o",
            label=f"{title}: held out, {result.loss:.3f} at the end",
        )
    config = next(iter(results.values())).config
    axes.set_title(f"Qwen3 with {parameters / 1e6:.1f} million parameters on Python's documentation, one seed")
    axes.set_xlabel(f"step ({tokens_per_step(config):,} tokens each)")
    axes.set_ylabel("cross-entropy per token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=150)


def report(results: dict[str, Result], parameters: int) -> None:
    row = "{:<10}{:>14}{:>15}{:>12}{:>18}"
    print("\n" + row.format("optimizer", "learning rate", "held-out loss", "perplexity", "training seconds"))
    for label, (config, loss, seconds, _) in results.items():
        rate = f"{config['learning_rate']:g}"
        print(row.format(label, rate, f"{loss:.4f}", f"{math.exp(loss):.1f}", f"{seconds:.0f}"))
    config = next(iter(results.values())).config
    print(
        f"\nEqual steps, not equal seconds: {config['max_steps']} steps of {tokens_per_step(config):,} tokens. One "
        f"seed and {parameters / 1e6:.1f} million\nparameters say little about a large model. Each learning rate is "
        "the best of examples/demo/sweep.csv.\nAdamW has one rate for all parameters here. In similar models another "
        "one for embeddings closes most of\nthe gap: docs/learning-rate.md. Larger studies: evidence/README.md\n"
        f"Both curves: {PICTURE.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
