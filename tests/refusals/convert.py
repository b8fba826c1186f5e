"""States of other optimizers that `convert_state_dict` does not convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_muon import Muon
from hf_muon.convert import FORMATS, convert_state_dict
from tests.convert.sources import OTHERS, names_of, ours, saved, trained
from tests.refusals import Refusal
from tests.support.other_muons import Model, deepspeed_like, halves, moonlight_like


def case(
    code: str,
    says: str = "",
    *,
    source: str = "llamafactory-v0",
    make: Callable[[Any], Any] = moonlight_like,
    edit: Callable[[Any], Any] | None = None,
    names: Callable[[list[str]], list[str]] | None = None,
    target: Callable[[Any], Muon] = ours,
    other: Callable[[Any], Any] = lambda model: model,
    name: str = "",
) -> Refusal:
    """Return a case in which the state of a trained optimizer is converted.

    The optimizer is one that `make` makes; `edit` changes its state or returns another one, `names` the names that are
    given, `other` the model, and `target` makes the optimizer of that model.
    """

    def given() -> dict[str, Any]:
        model, optimizer = trained(make)
        state = saved(optimizer)
        changed = edit(state) if edit else None
        own = {"names": names(names_of(model, optimizer))} if names else {}
        model = other(model)
        return {"state": changed or state, "model": model, "target": target(model), "own": own}

    def attempt(given: dict[str, Any]) -> None:
        convert_state_dict(given["state"], given["model"], given["target"], source, **given["own"])

    return Refusal(code, "convert_state_dict", attempt, given=given, says=says, name=name or source)


def changed(position: int, **values: Any) -> Callable[[Any], None]:
    """Return what changes the state of the parameter at a position, -1 for the last; None removes a key."""

    def edit(state_dict: Any) -> None:
        state = state_dict["state"][position % len(state_dict["state"])]
        state.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del state[key]

    return edit


def with_another_layer(_: Model) -> Model:
    larger = Model()
    larger.layers.append(nn.Linear(16, 16, bias=False))
    return larger


def with_a_frozen_layer(model: Model) -> Model:
    model.layers[2].requires_grad_(False)
    return model


DEEPSPEED: dict[str, Any] = {"source": "deepspeed", "make": deepspeed_like}
BUFFER, SMALL = torch.ones(16, 16), torch.ones(3, 4)
CASES = [
    case("unknown-format", f"'moonlit' .*{', '.join(FORMATS)}", source="moonlit"),
    *(
        case("not-a-state", "ZeRO", source=source, edit=lambda _, wrong=wrong: wrong)
        for wrong in ({"model": 1}, [1], {"param_groups": 3, "state": {}})
        for source in ("torch", "deepspeed")
    ),
    *(case("foreign-state", r"'wd'\]", source=source) for source in ("torch", "deepspeed")),
    *(case("foreign-state", "hf_muon's own", source=source, make=ours, name=f"own-{source}") for source in FORMATS),
    case("foreign-moments", r"\['momentum'\]", edit=changed(0, momentum_buffer=None, momentum=BUFFER), name="key"),
    case("foreign-moments", r"parameter 0 .*\['momentum_buffer'\]", edit=changed(0, use_muon=False), name="flag"),
    case("foreign-moments", r"\['moment1', 'moment2'\]", edit=changed(-1, step=None), name="no-step"),
    case(
        "moment-shape",
        r"q_proj\.weight \(16, 16\): its momentum_buffer .*\(3, 4\).*order of --names",
        edit=changed(0, momentum_buffer=SMALL),
        name="shape",
    ),
    case(
        "moments-missing",
        r"for layers\.\S+weight, layers\.\S+weight\. It ",
        edit=lambda state: [state["state"].pop(k) for k in (3, 4)] and None,
        name="none",
    ),
    case("no-momentum", edit=lambda state: state["param_groups"][0].pop("momentum") and None, name="no-momentum"),
    case("no-momentum", edit=lambda state: state["param_groups"][0].update(momentum=1.5), name="momentum-1.5"),
    case("names-misfit", "18 .* 25 ", other=with_a_frozen_layer, name="frozen"),
    case("names-needed", "names, --names", **DEEPSPEED),
    case("names-misfit", "24 .* 25 ", names=lambda names: names[1:], name="one-less", **DEEPSPEED),
    case("names-misfit", "layer.0", names=lambda n: ["layer.0.q_proj.weight", *n[1:]], name="unknown", **DEEPSPEED),
    case("names-misfit", names=lambda names: [names[1], *names[1:]], name="twice", **DEEPSPEED),
    case("routing-changed", names=lambda n: [n[-1], *n[1:-1], n[0]], name="swapped", **DEEPSPEED),
    # The first two matrices of Muon have one shape, the fifth is of another.
    case("names-order", r"up_proj.* before .*up_proj", names=lambda n: [n[1], n[0], *n[2:]], **DEEPSPEED),
    case("moment-shape", "--names", names=lambda n: [*n[3:12], *n[:3], *n[12:]], name="model's-order", **DEEPSPEED),
    # A model with one matrix more: nothing is left to a guess.
    *(
        case(
            "moments-missing" if name == "deepspeed" else "names-misfit",
            make=make,
            source=source,
            other=with_another_layer,
            names=list if name == "deepspeed" else None,
            name=f"larger-{name}",
        )
        for name, (source, make, _) in OTHERS.items()
    ),
    case("no-names", "build_optimizer", target=lambda model: Muon(halves(model)[0])),
]
