"""Evidence: small studies that compare Muon with AdamW in the ordinary Trainer, with every trial in a CSV file.

`studies/` says what is trained, `results/` holds a row for each trial, and README.md says how it is measured.
"""
