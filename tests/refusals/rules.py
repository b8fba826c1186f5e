"""Rules, `qk_clip`, factors of the learning rate and views: what cannot be meant, registered, measured or loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonConfig, MuonOfGroups, build_optimizer
from hf_muon.config import OPTIONS as OPTIONS_OF_MUON
from hf_muon.optim_args import parse_optim_args
from hf_muon.rules import Option, Rule, register, registry, types
from hf_muon.rules.normalize import SECOND_MOMENT
from tests.optimizer.cases import SHAPES, gradients, parameters, run
from tests.refusals import Refusal, table
from tests.rules import others
from tests.rules.attention_models import backward, make, tokens
from tests.rules.test_scales import net

COMPILES = [pytest.mark.extended]  # for half a minute

# --- qk_clip


def built(given: nn.Module, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    build_optimizer(given, qk_clip=100, **options)


def lora() -> nn.Module:
    import peft

    return peft.get_peft_model(make("llama"), peft.LoraConfig(r=3, target_modules=["q_proj"]))  # type: ignore[arg-type]


def frozen_in_part() -> nn.Module:
    model = make("llama")
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    return model


def two_thresholds(given: nn.Module) -> None:
    groups = [
        {"params": [(n, p) for n, p in given.named_parameters() if ("k_proj" in n) is chosen], "qk_clip": value}
        for chosen, value in ((True, 50.0), (False, 100.0))
    ]
    MuonOfGroups(groups, model=given)


def without_model() -> Any:
    model = make("llama")
    optimizer = Muon([p for n, p in model.named_parameters() if "proj" in n], qk_clip=100)
    backward(model, tokens(1))
    return optimizer


def a_copy() -> Any:
    optimizer = copy.deepcopy(build_optimizer(make("llama"), qk_clip=100))
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    return optimizer


def in_evaluation() -> Any:
    model = make("llama").eval()
    optimizer = build_optimizer(model, qk_clip=100)
    model(input_ids=tokens(1), labels=tokens(1)).loss.backward()
    return optimizer


def forward(given: Any) -> None:
    given(input_ids=tokens(1), labels=tokens(1))


def masked() -> nn.Module:
    model = make("llama", "flex_attention")  # whose forward pass makes a mask
    build_optimizer(model, qk_clip=100)
    return model


class Attention(nn.Module):
    """An attention that transformers does not compute."""

    head_dim = 4

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_module(name, nn.Linear(8, 8))


def of_attention(*names: str) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({"attention": Attention(*names), "mlp": nn.Linear(8, 8)})


def without_keys(given: nn.Module) -> None:
    groups = [{"params": [(n, p) for n, p in given.named_parameters() if "k_proj" not in n], "qk_clip": 100.0}]
    MuonOfGroups(groups, model=given)


def other_heads() -> nn.Module:
    """Return a model that gets twice as many query heads behind the optimizer's back."""
    model = make("llama")
    build_optimizer(model, qk_clip=100)
    model.model.layers[0].self_attn.q_proj = nn.Linear(32, 64)
    return model


BUILD, STEP = "build_optimizer", "Muon.step"
QK_CLIP = [
    *table(
        [
            ("unknown-attention", BUILD, of_attention("q_proj")),
            ("unknown-attention", BUILD, of_attention("q_proj", "query", "k_proj")),
            ("unmeasured-attention", BUILD, of_attention("q_proj", "k_proj")),
            ("normalized-attention", BUILD, lambda: make("qwen3"), "1 more .*q_norm, k_norm"),
            ("frozen-attention", BUILD, frozen_in_part, r"layers\.0"),
        ],
        attempt=built,
    ),
    Refusal("frozen-attention", BUILD, partial(built, options={"lora": "muon"}), given=lora),
    Refusal(
        "no-attention",
        BUILD,
        partial(built, options={"muon_patterns": "0.weight"}),
        given=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
    ),
    *table(
        [
            ("weights-without-group", "MuonOfGroups", without_keys, "k_proj"),
            ("options-within-attention", "MuonOfGroups", two_thresholds, "qk_clip"),
        ],
        given=lambda: make("llama"),
    ),
    *table(
        [
            ("model-needed", STEP, without_model),
            ("model-needed", STEP, a_copy),
            ("no-forward-pass", STEP, in_evaluation),
        ],
        attempt=lambda given: given.step(),
        error=RuntimeError,
    ),
    Refusal("heads-misfit", "a forward pass", forward, RuntimeError, other_heads, "8 query .* make 4"),
    Refusal("unreadable-mask", "a forward pass", forward, RuntimeError, masked, "flex_attention", marks=COMPILES),
]

# --- factors of the learning rate, views


def over(**group: Any) -> Callable[[], Any]:
    return lambda: Muon([{"params": parameters(SHAPES), **group}])


def one(shape: tuple[int, ...], *views: Any) -> Callable[[], Any]:
    return lambda: Muon([{"params": [nn.Parameter(torch.zeros(shape))], "views": list(views)}])


def muon(**options: Any) -> Callable[[], Any]:
    return lambda: Muon(parameters(), **options)


def with_scales(scales: str) -> Callable[[Any], Any]:
    return lambda given: build_optimizer(given, lr_scales=scales)


def without_embedding() -> nn.Module:
    model = net()
    model.embed_tokens.weight.requires_grad_(False)
    return model


WRONG_SCALES: list[Any] = [
    *("embed", "embed:", "embed:-1", "a:1|b"),
    *({"embed": -1}, {"(": 1}, {"": 1}, {"a": "b"}, {"a": None}, {1: 1}),
]
WRONG_VIEWS = [
    *("rows", "rows 3+", "rows +3", "rows 3++4", "rows 0", "rows 0x3", "rows 3, columns 4", "flat, columns 3"),
    *("row 3", "transposed 3", "rows 2x", "rows 3 ", "transposed, transposed", "rows 2*3*4", "columns (3", "rows 3+2"),
]
LISTS = [
    *table(
        [
            ("not-one-for-each", "Muon", over(lr_factors=[1.0]), "1 of 6"),
            ("not-one-for-each", "Muon", over(lr_factors=[-1.0] * 6)),
            ("not-one-for-each", "Muon", over(lr_factors=0.5), r"0\.5"),
            ("not-one-for-each", "Muon", one((2, 2), "", ""), "views: 2 of 1"),
            *(("not-a-matrix", "Muon", one((6, 4), view), "parameter 0") for view in WRONG_VIEWS),
            ("unknown-option", "Muon", muon(muon_lr=0.1), "'muon_lr'.* build_optimizer and MuonOfGroups"),
            *(("invalid-value", "Muon", muon(qk_clip=x), "qk_clip=") for x in (0, -1, "100", True, float("nan"))),
            ("not-a-matrix", "Muon", one((6, 4, 2, 2), "rows 6"), "rows 6"),
            *(("invalid-value", "MuonConfig", partial(MuonConfig, lr_scales=x), "lr_scales=") for x in WRONG_SCALES),
        ]
    ),
    *table(
        [
            ("matches-nothing", BUILD, with_scales("embedding:2"), "Names look like embed_tokens"),
            ("shadowed-pattern", BUILD, with_scales("proj:2|0.proj:3"), "'0.proj'"),
        ],
        given=net,
    ),
    Refusal("matches-nothing", BUILD, with_scales("embed:2"), given=without_embedding, says="only embed_tokens.weight"),
]

# --- rules of users, and state of rules


def registered_as(**changes: Any) -> Callable[[], None]:
    own = {**option("another"), "name": "another", "is_on": bool, "direction": others.rows_normalized}
    return lambda: register(Rule(**{**own, **changes}))


def rules() -> dict[str, Any]:
    return {"rules": dict(registry.RULES), "options": dict(OPTIONS_OF_MUON)}


def option(name: str) -> dict[str, Any]:
    return {"options": {name: Option(types.flag(), False, "")}}


def of_others(function: Callable[[Any], Any], value: Any) -> Callable[[], None]:
    def attempt() -> None:
        with others.registered():
            function(value)

    return attempt


def trained() -> SimpleNamespace:
    """Return an optimizer with a rule that has state, and its state after two steps."""
    weights = parameters()
    optimizer = Muon(weights, normalize="rows")
    run(optimizer, weights, gradients(steps=2))
    return SimpleNamespace(weights=weights, optimizer=optimizer)


def loaded(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def attempt(given: SimpleNamespace) -> None:
        saved = copy.deepcopy(trained().optimizer.state_dict())
        change(saved["state"][1])
        given.optimizer.load_state_dict(saved)

    return attempt


def without_their_rules(given: SimpleNamespace) -> None:
    with others.registered():
        saved = trained().optimizer.state_dict()
    given.optimizer.load_state_dict(saved)


def stepped(change: Callable[[Any], Any], *, of_all: bool = False) -> Callable[[], None]:
    def attempt() -> None:
        made = trained()
        before = [weight.detach().clone() for weight in made.weights]
        for weight in made.weights if of_all else made.weights[1:2]:
            change(made.optimizer.state[weight])
        try:
            made.optimizer.step()
        finally:
            assert all(map(torch.equal, made.weights, before))

    return attempt


def two_decays() -> None:
    with others.registered():
        register(Rule(name="another", is_on=bool, apply=others.pulled, decays=True, **option("another")))
        Muon(parameters(), weight_decay_mode="cautious", another=True)


LOST: Callable[[Any], Any] = lambda state: state.pop(SECOND_MOMENT)  # noqa: E731
SMALL: Callable[[Any], Any] = lambda state: state.update({SECOND_MOMENT: torch.zeros(5)})  # noqa: E731
OPTIONS, REGISTER, LOAD = "MuonConfig.from_mapping", "register", "Muon.load_state_dict"
RULES = [
    *table(
        [
            ("name-taken", REGISTER, registered_as(name="normalize"), "'normalize' exists"),
            ("name-taken", REGISTER, registered_as(**option("lr")), "'lr' exists"),
            ("name-taken", REGISTER, registered_as(state={"momentum_buffer": "row"}), "'momentum_buffer' exists"),
            ("name-taken", REGISTER, registered_as(state={SECOND_MOMENT: "row"}), f"'{SECOND_MOMENT}' exists"),
        ],
        given=rules,
    ),
    *table(
        [
            ("two-weight-decays", "Muon", two_decays, "another"),
            ("invalid-value", OPTIONS, of_others(MuonConfig.from_mapping, {"their_beta": "2"}), r"their_beta=2\.0"),
            ("unknown-option", "optim_args", of_others(parse_optim_args, "their_betas=0.5"), "'their_beta'"),
            ("momentum-below-warmup", "Muon", muon(momentum=0.8, momentum_warmup=3), r"0\.85"),
        ]
    ),
    *table(
        [
            ("newer-state", LOAD, without_their_rules, "their_beta, their_everything.*register it before the load"),
            ("moments-missing", LOAD, loaded(LOST), SECOND_MOMENT),
            ("moment-shape", LOAD, loaded(SMALL), SECOND_MOMENT),
        ],
        given=trained,
    ),
    *table(
        [
            ("rule-state-gone", STEP, stepped(LOST), SECOND_MOMENT),
            ("rule-state-gone", STEP, stepped(LOST, of_all=True), SECOND_MOMENT),
            ("rule-state-gone", STEP, stepped(SMALL), SECOND_MOMENT),
        ],
        error=RuntimeError,
    ),
    Refusal(
        "momentum-below-warmup",
        LOAD,
        lambda given: given.load_state_dict(Muon(parameters(), momentum=0.5).state_dict()),
        given=lambda: Muon(parameters(), momentum_warmup=3),
        says="param group 0",
    ),
]

CASES = [*QK_CLIP, *LISTS, *RULES]
