"""Declare an option: how text is read, which values are valid, and its name in errors and docstrings.

This package imports `math` and `storage`. `hf_muon.config` declares the options. Others may use
`compile_patterns`.
"""
