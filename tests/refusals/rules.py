"""Rules, `qk_clip`, factors of the learning rate and views: what cannot be meant, registered, measured or loaded."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonConfig, MuonOfGroups, build_optimizer
from hf_muon.optim_args import parse_optim_args
from hf_muon.rules import Option, Rule, register, registry, types
from hf_muon.rules.normalize import SECOND_MOMENT
from tests.optimizer.cases import SHAPES, gradients, parameters, run
from tests.refusals import Refusal
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


def forward_with_a_mask(given: Any) -> None:
    given(input_ids=tokens(1), labels=tokens(1))


def masked() -> nn.Module:
    model = make("llama", "flex_attention")
    build_optimizer(model, qk_clip=100)
    return model


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def without_reduction(rank: int) -> str:
    """Return the error of a step in which no wrapper has reduced gradients."""
    model = nn.parallel.DistributedDataParallel(make("llama"))
    optimizer = build_optimizer(model, qk_clip=100)
    with model.no_sync():
        backward(model, tokens(rank))
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


QK_CLIP = [
    Refusal(
        "normalized-attention", "build_optimizer", built, given=lambda: make("qwen3"), says="1 more .*q_norm, k_norm"
    ),
    Refusal("frozen-attention", "build_optimizer", partial(built, options={"lora": "muon"}), given=lora, name="lora"),
    Refusal("frozen-attention", "build_optimizer", built, given=frozen_in_part, says=r"layers\.0", name="in part"),
    Refusal("no-attention", "build_optimizer", partial(built, options={"muon_patterns": "0.weight"}), given=two_layers),
    Refusal("options-within-attention", "MuonOfGroups", two_thresholds, given=lambda: make("llama"), says="qk_clip"),
    *(
        Refusal(code, "Muon.step", lambda given: given.step(), RuntimeError, given, name=given.__name__)
        for code, given in [
            ("model-needed", without_model),
            ("model-needed", a_copy),
            ("no-forward-pass", in_evaluation),
        ]
    ),
    Refusal(
        "unreadable-mask", "a forward pass", forward_with_a_mask, RuntimeError, masked, "flex_attention", marks=COMPILES
    ),
    Refusal("logits-of-one-rank", "Muon.step on ranks", lambda pools: pools[2].run(without_reduction), says="one of 2"),
    *(
        Refusal(
            "invalid-value",
            "Muon",
            lambda value=value: Muon([nn.Parameter(torch.ones(2, 2))], qk_clip=value),
            says="qk_clip=",
            name=f"qk_clip={value}",
        )
        for value in (0, -1, "100", True, float("nan"))
    ),
]

# --- factors of the learning rate, views


def over(**group: Any) -> Callable[[], Any]:
    return lambda: Muon([{"params": parameters(SHAPES), **group}])


def one(shape: tuple[int, ...], *views: Any) -> Callable[[], Any]:
    return lambda: Muon([{"params": [nn.Parameter(torch.zeros(shape))], "views": list(views)}])


def without_embedding() -> nn.Module:
    model = net()
    model.embed_tokens.weight.requires_grad_(False)
    return model


WRONG_SCALES = [
    "embed",
    "embed:",
    "embed:-1",
    {"embed": -1},
    {"(": 1},
    {"": 1},
    {"a": "b"},
    {"a": None},
    {1: 1},
    "a:1|b",
]
WRONG_VIEWS = [
    *("rows", "rows 3+", "rows +3", "rows 3++4", "rows 0", "rows 0x3", "rows 3, columns 4", "flat, columns 3"),
    *("row 3", "transposed 3", "rows 2x", "rows 3 ", "transposed, transposed", "rows 2*3*4", "columns (3", "rows 3+2"),
]
LISTS = [
    Refusal("not-one-for-each", "Muon", over(lr_factors=[1.0]), says="1 of 6", name="lr_factors"),
    Refusal("not-one-for-each", "Muon", over(lr_factors=[-1.0] * 6), name="negative lr_factors"),
    Refusal("not-one-for-each", "Muon", over(lr_factors=0.5), says=r"0\.5", name="a number of lr_factors"),
    Refusal("not-one-for-each", "Muon", one((2, 2), "", ""), says="views: 2 of 1", name="views"),
    *(Refusal("not-a-matrix", "Muon", one((6, 4), view), says="parameter 0", name=view) for view in WRONG_VIEWS),
    Refusal("not-a-matrix", "Muon", one((6, 4, 2, 2), "rows 6"), says="rows 6", name="view"),
    *(
        Refusal(
            "invalid-value",
            "MuonConfig",
            lambda value=value: MuonConfig(lr_scales=value),
            says="lr_scales=",
            name=f"lr_scales={value}",
        )
        for value in WRONG_SCALES
    ),
    *(
        Refusal(
            code,
            "build_optimizer",
            lambda given, scales=scales: build_optimizer(given, lr_scales=scales),
            given=given,
            says=says,
            name=scales,
        )
        for code, given, scales, says in [
            ("matches-nothing", net, "embedding:2", "Names look like embed_tokens"),
            ("shadowed-pattern", net, "proj:2|0.proj:3", "'0.proj'"),
            ("matches-nothing", without_embedding, "embed:2", "only embed_tokens.weight"),
        ]
    ),
]

# --- rules of others, and state of rules


def registered_as(changes: Mapping[str, Any] = MappingProxyType({})) -> None:
    options = {"another": Option(types.flag(), False, "", scope="group")}
    register(
        Rule(**{"name": "another", "options": options, "is_on": bool, "direction": others.rows_normalized, **changes})
    )


def rules() -> dict[str, Any]:
    return {"rules": dict(registry.RULES), "options": dict(registry.OTHERS_OPTIONS)}


def option(name: str, **scope: Any) -> dict[str, Any]:
    return {"options": {name: Option(types.flag(), False, "", **scope)}}


def entry_point_that_is_gone(monkeypatch: Any) -> None:
    points = [importlib.metadata.EntryPoint("gone", "tests.rules.others:GONE", registry.ENTRY_POINTS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    registry.load_entry_points.cache_clear()
    try:
        MuonConfig.from_mapping({"unknown": "true"})
    finally:
        registry.load_entry_points.cache_clear()


def two_decays() -> None:
    with others.registered():
        registered_as({"decays": True, "is_on": lambda options: options["another"]})
        Muon(parameters(), another=True)  # alone it is right
        Muon(parameters(), another=True, weight_decay_mode="cautious")


def of_others(attempt: Callable[[], Any]) -> Callable[[], None]:
    def attempted() -> None:
        with others.registered():
            attempt()

    return attempted


def trained() -> SimpleNamespace:
    """Return an optimizer with a rule that has state, and its state after two steps."""
    weights = parameters()
    optimizer = Muon(weights, normalize="rows")
    run(optimizer, weights, gradients(steps=2))
    return SimpleNamespace(weights=weights, optimizer=optimizer)


def loaded(given: SimpleNamespace, change: Callable[[Any], Any]) -> None:
    saved = copy.deepcopy(trained().optimizer.state_dict())
    change(saved["state"][1])
    given.optimizer.load_state_dict(saved)


def stepped(change: Callable[[Any], Any]) -> None:
    made = trained()
    before = [weight.detach().clone() for weight in made.weights]
    change(made.optimizer.state[made.weights[1]])
    try:
        made.optimizer.step()
    finally:
        assert all(map(torch.equal, made.weights, before))


def below_the_start_of_a_schedule(given: Any) -> None:
    given.load_state_dict(Muon(parameters(), momentum=0.5).state_dict())


LOST: Callable[[Any], Any] = lambda state: state.pop(SECOND_MOMENT)  # noqa: E731
SMALL: Callable[[Any], Any] = lambda state: state.update({SECOND_MOMENT: torch.zeros(5)})  # noqa: E731
RULES = [
    *(
        Refusal(code, "register", partial(registered_as, changes=changes), given=rules, says=says, name=says)
        for code, says, changes in [
            ("name-taken", "rule 'normalize'", {"name": "normalize"}),
            ("name-taken", "option 'lr'", option("lr", scope="group")),
            ("name-taken", "state 'momentum_buffer'", {"state": {"momentum_buffer": "row"}}),
            ("name-taken", "state 'update'", {"state": {"update": "row"}}),  # update_rms is measured already
            ("rule-without-function", "another", {"direction": None}),
            ("rule-scope", "option 'new'", option("new")),
        ]
    ),
    Refusal("two-weight-decays", "Muon", two_decays, says="weight_decay_mode and another"),
    Refusal("not-a-rule", "register", lambda: register("normuon"), says="normuon"),
    Refusal("rule-not-loaded", "MuonConfig.from_mapping", entry_point_that_is_gone, RuntimeError, says="others:GONE"),
    Refusal(
        "invalid-value",
        "MuonConfig.from_mapping",
        of_others(lambda: MuonConfig.from_mapping({"their_beta": "2"})),
        says=r"their_beta=2\.0",
        name="rules of others",
    ),
    Refusal(
        "unknown-option",
        "optim_args",
        of_others(lambda: parse_optim_args("their_betas=0.5")),
        says="'their_beta'",
        name="rules of others",
    ),
    *(
        Refusal(
            code, "Muon.load_state_dict", partial(loaded, change=change), given=trained, says=SECOND_MOMENT, name=code
        )
        for code, change in [
            ("moments-missing", LOST),
            ("moment-shape", SMALL),
            ("moment-not-finite", lambda state: state[SECOND_MOMENT].fill_(torch.nan)),
            ("negative-moment", lambda state: state[SECOND_MOMENT].neg_()),
        ]
    ),
    *(
        Refusal("rule-state-gone", "Muon.step", partial(stepped, change), RuntimeError, says=SECOND_MOMENT, name=name)
        for name, change in [("gone", LOST), ("resized", SMALL)]
    ),
    Refusal(
        "momentum-below-warmup", "Muon", lambda: Muon(parameters(), momentum=0.8, momentum_warmup=3), says=r"0\.85"
    ),
    Refusal(
        "momentum-below-warmup",
        "Muon.load_state_dict",
        below_the_start_of_a_schedule,
        given=lambda: Muon(parameters(), momentum_warmup=3),
        says="param group 0",
    ),
]

CASES = [*QK_CLIP, *LISTS, *RULES]
