"""What one option is: how text is read, which values are valid, and how errors and docstrings name it.

The room imports `math` and `storage`. `hf_muon.config` declares the options with it. Other rooms may use `quoted` for
their errors, and `compile_patterns`.
"""
