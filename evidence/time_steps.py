"""Time the steps of several sides in turn, each in a fork of this process, and write them.

python -m evidence.time_steps SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from evidence.chat import corpus_in
from evidence.corpus import Corpus
from evidence.trial import build_trainer, new_model, register_rules, write_result

LONGEST = 600
"""Seconds that a step may take, with what comes before the first one."""


class Turns(TrainerCallback):
    """Waits for its turn before each step, and sends the processor seconds of the step.

    Args:
        pipe: where a message means "your turn", and the seconds go.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self._began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._wait()

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        self.pipe.send(time.process_time() - self._began)
        if state.global_step < args.max_steps:
            self._wait()

    def _wait(self) -> None:
        self.pipe.recv()
        self._began = time.process_time()


def steps_of(sides: Mapping[str, Any], corpus: Corpus, turns: int, warm_up: int) -> dict[str, list[float]]:
    """Return the milliseconds of steps by side; in each turn all sides take one.

    Args:
        sides: specs of `evidence.study.Trial` by side.
        corpus: the text.
        turns: number of steps of each side.
        warm_up: first turns that do not count.

    Raises:
        RuntimeError: a side ends early, or takes too long for a step.
    """
    fork = multiprocessing.get_context("fork")  # what was imported is imported once
    found: dict[str, list[float]] = {side: [] for side in sides}
    pipes: dict[str, Any] = {}
    with ExitStack() as stack:
        for side, spec in sides.items():
            pipes[side], theirs = fork.Pipe()
            job = ({**spec, "steps": turns}, corpus, theirs, list(pipes.values()))
            process = fork.Process(target=_train, args=job, daemon=True)
            process.start()
            stack.callback(process.terminate)
            theirs.close()
        for turn in range(turns):
            first = turn % len(pipes)  # whose caches a side finds changes from turn to turn
            for side, pipe in [*pipes.items()][first:] + [*pipes.items()][:first]:
                try:
                    pipe.send("your turn")
                    if not pipe.poll(LONGEST):
                        raise RuntimeError(f"{side} takes more than {LONGEST} seconds for a step")
                    found[side].append(round(1000 * pipe.recv(), 2))
                except (EOFError, OSError) as error:
                    raise RuntimeError(f"{side} has ended after {len(found[side])} of {turns} steps") from error
    return {side: steps[warm_up:] for side, steps in found.items()}


def _train(spec: Mapping[str, Any], corpus: Corpus, pipe: Any, others: list[Any]) -> None:
    for other in others:  # the parent's ends, which a fork inherits: without them it sees that the parent has ended
        other.close()
    trainer = build_trainer(spec, corpus, new_model(spec, corpus))
    trainer.add_callback(Turns(pipe))
    trainer.train()


def main(spec_file: str, result_file: str) -> None:
    content = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    register_rules()
    transformers.logging.set_verbosity_error()
    spec = content["spec"]
    found = steps_of(spec["sides"], corpus_in(Path(content["corpus"])), spec["turns"], spec["warm_up"])
    write_result(Path(result_file), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
