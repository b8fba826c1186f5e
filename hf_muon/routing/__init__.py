"""Which weight goes to Muon, which to AdamW, as which matrices, and why.

The room reads a model and imports `options`, `config` and `storage`. Others ask `route_parameters`.
"""

from hf_muon.routing.route import Route, route_parameters, table

__all__ = ["Route", "route_parameters", "table"]
