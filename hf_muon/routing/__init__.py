"""Decide which weights go to Muon, which to AdamW, as which matrices, and why.

This package reads a model, and imports `options`, `config` and `storage`. Others use `route_parameters`, `table`, and
the facts about models in `model_facts`.
"""

from hf_muon.routing.route import Route, route_parameters, table

__all__ = ["Route", "route_parameters", "table"]
