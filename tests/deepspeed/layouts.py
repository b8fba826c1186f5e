"""ZeRO as layouts of `tests.equality`: fp32 weights, given gradients, and checkpoints that go on in another layout."""

from __future__ import annotations

import functools

from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.runs import CPU, HPZ, rank_of_environment, whole_state
from tests.equality.layouts import Layout


class ZeRO(Layout):
    """An engine of a stage with settings of `zero_optimization`."""

    def __init__(self, *args, stage, **zero):
        self.zero = {"stage": stage, **zero}
        if stage == 3:
            self.zero |= {"stage3_param_persistence_threshold": 20, "memory_efficient_linear": False}
        super().__init__(*args)

    def start(self):
        rank_of_environment()
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": self.zero}
        self.optimizer = self.build()
        self.model, *_ = initialize(model=self.module, optimizer=self.optimizer, config=config)

    def backward(self, gradients):
        self.model.backward(self.model(gradients))

    def step(self):
        self.model.step()

    def tensors(self):
        """Leave out masters, which are the weights, and the state of rules, which is small."""
        shapes = {name: getattr(param, "ds_shape", param.shape) for name, param in self.module.named_parameters()}
        return {
            f"{name} {key}": value.reshape(() if key == "step" else shapes[name])
            for name, own in whole_state(self.model, self.optimizer).items()
            for key, value in own.items()
            if key == "step" or (key != "master" and value.numel() == shapes[name].numel())
        }

    def save(self, path, without=""):
        self.model.save_checkpoint(path)

    def load(self, path, **options):
        self.model.load_checkpoint(path)

    def end(self):
        self.model.destroy()
        super().end()


LAYOUTS = {
    **{f"zero{stage}": functools.partial(ZeRO, stage=stage) for stage in range(4)},
    **{f"zero{stage}_cpu": functools.partial(ZeRO, stage=stage, **CPU) for stage in (1, 2, 3)},
    "zero2_turns": functools.partial(ZeRO, stage=2, round_robin_gradients=True),
    "zero3_hpz": functools.partial(ZeRO, stage=3, **HPZ),
}
