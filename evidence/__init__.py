"""Evidence: studies of Muon beside AdamW over the ordinary Trainer, at small scale, with every trial in a CSV file.

`studies/` says what is trained, `results/` holds a row for each trial, and README.md says how it is measured.
"""
