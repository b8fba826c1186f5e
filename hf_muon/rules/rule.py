"""A rule: data and pure functions that change a step of Muon. docs/rules.md has examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from hf_muon.options.declaration import Option
from hf_muon.rules.heads import Heads

StateKind = Literal["weight", "row"]
"""The kind of a state: a number for each element of a weight, or for each row of a matrix ``(out, in)``."""

Options = Mapping[str, Any]
"""The options of a param group, by name, with the learning rate of this step."""

States = Mapping[str, Tensor]
"""The state of what a function gets, by key, fp32. A function writes to it what the next step reads."""

Orthogonalize = Callable[[Tensor], Tensor]
"""Returns the directions of whole matrices ``(B, out, in)``, fp32. It may overwrite its argument."""

Update = Callable[[Tensor, Tensor, Tensor, States, Options, int], Tensor]
Direction = Callable[[Tensor, Orthogonalize, States, Options, int], Tensor]
Apply = Callable[[Tensor, Tensor, States, Options, int, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Functions that a step calls in addition to, or instead of, parts of plain Muon.

    Functions are pure except for their state, and do not depend on ranks or shards. Elementwise ones get any piece of a
    matrix; each element of their result may depend only on this element. They modify only their state.

    Attributes:
        name: the name of the rule, for errors.
        options: the options that it declares, by name. YAML and `optim_args` set them like those of Muon.
        is_on: whether the options of a param group ask for the rule.
        state: the state that it keeps for each parameter: a key, which no other rule has, and the kind, `weight` or
            `row`. State is fp32, zero before the first step, and is saved and resharded like momentum.
        hyperparameters: called with the options and the number of the step, from one; returns options of Muon that
            have other values in this step (`momentum`, `nesterov`, `weight_decay`, `ns_coefficients`, `ns_steps`).
        update: elementwise, before orthogonalization. Called with updates, gradients, weights, their state of the kind
            `weight`, the options and the number of the step; returns the updates to orthogonalize, in their dtype. With
            `momentum` and `nesterov` from `hyperparameters`, a rule decides what average an update is.
        direction: on whole matrices, in place of orthogonalization. Called with updates ``(B, out, in)`` in fp32, the
            function that orthogonalizes them, state ``(B, out, 1)`` of the kind `row`, the options and the number of
            the step; returns directions of that shape. Of several rules, each orthogonalizes by the function of the
            next one; those with state come first.
        apply: elementwise, as directions are applied, ``weight -= lr * scale * direction``. Called with directions and
            weights in fp32, their state of the kind `weight`, the options, the number of the step and the scale;
            returns directions.
        decays: whether `apply` applies the weight decay, in place of the step.
        head_factors: after the step, on the heads of each attention. Called with the largest attention logit of each
            query head ``(H,)`` in the forward passes since the last step, over all ranks, fp32 on the CPU, the heads
            and the options; returns factors of whole heads of weights and biases: `query` ``(H,)``, `key` ``(K,)`` and
            `query_rotary` ``(H,)``. It applies to a group's attention weights, whichever optimizer steps them. Logits
            are measured only if a rule has this function.
        head_complaint: called with the heads and the options; returns why an attention does not suit the rule, or None.
        complaint: called with the options; returns why they do not go together, or None. Such options are refused
            before a step.
    """

    name: str
    options: Mapping[str, Option]
    is_on: Callable[[Options], bool]
    state: Mapping[str, StateKind] = field(default_factory=dict)
    hyperparameters: Callable[[Options, int], Mapping[str, Any]] | None = None
    update: Update | None = None
    direction: Direction | None = None
    apply: Apply | None = None
    decays: bool = False
    head_factors: Callable[[Tensor, Heads, Options], Mapping[str, Tensor]] | None = None
    head_complaint: Callable[[Heads, Options], str | None] | None = None
    complaint: Callable[[Options], str | None] | None = None
