"""Dry runs: a user's own command runs until its optimizer is made, on models without weights, and ends.

`HF_MUON_DRY_RUN=1 COMMAND` prints the report of the run; `hf-muon inspect -- COMMAND` puts a folder into the variable,
in which it finds the report. `hooks` are what acts in the command's processes, `report` is what they say, and `parent`
starts the command.
"""
