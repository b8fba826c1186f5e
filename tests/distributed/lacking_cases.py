"""State dicts of optimizers without some of their parts."""

from __future__ import annotations

import re


def without(state, names, flatten=False):
    """Remove moments ("shift exp_avg"), states of parameters ("shift") or keys of groups ("groups step")."""
    for name in names:
        param, _, key = name.partition(" ")
        if param == "groups":
            for group in [state] if flatten else state["param_groups"]:
                for own in [own for own in group if re.fullmatch(rf"(?!state\.)(.*\.)?{key}", own)]:
                    del group[own]
        elif flatten:
            for own in [own for own in state if own.startswith(f"state.{param}.{key}")]:
                del state[own]
        elif key:
            del state["state"][param][key]
        else:
            del state["state"][param]
