"""The `hf-muon` command: a module for each of its commands.

The room imports all others. Nothing imports it.
"""

from hf_muon.cli.app import main

__all__ = ["main"]
