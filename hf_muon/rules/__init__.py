"""Rules that change a step of Muon at one of five points, each written once for every layout; see docs/rules.md."""

from hf_muon.options import types
from hf_muon.options.declaration import Option
from hf_muon.rules.registry import register
from hf_muon.rules.rule import Rule

__all__ = ["Option", "Rule", "register", "types"]
