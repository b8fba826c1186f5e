"""Sides take steps in turn; `test_runner.py` measures a study from end to end."""

from __future__ import annotations

import os
from types import SimpleNamespace

import evidence.time_steps
from evidence.time_steps import steps_of
from evidence.times import quicker


class Stub:
    """A trainer that writes its name into a pipe at each step."""

    def __init__(self, spec):
        self.spec = spec

    def add_callback(self, callback):
        self.callback = callback

    def train(self):
        args = SimpleNamespace(max_steps=self.spec["steps"])
        self.callback.on_train_begin(args)
        for step in range(1, args.max_steps + 1):
            os.write(self.spec["to"], self.spec["name"].encode())
            self.callback.on_step_end(args, SimpleNamespace(global_step=step))


def test_sides_take_turns_and_first_steps_do_not_count(monkeypatch):
    monkeypatch.setattr(evidence.time_steps, "build_trainer", lambda spec, corpus, model: Stub(spec))
    monkeypatch.setattr(evidence.time_steps, "new_model", lambda *args: None)
    reads, writes = os.pipe()
    found = steps_of({name: {"name": name, "to": writes} for name in "ab"}, None, turns=4, warm_up=2)
    assert os.read(reads, 99) == b"abbaabba"
    assert [len(found[name]) for name in "ab"] == [2, 2]
    os.close(reads)
    os.close(writes)


def test_the_middle_turn_decides():
    assert quicker([1.0, 1.0, 1.0], [2.0, 9.0, 1.0]) == 2.0
