"""Rules: against slow loops, alone and in pairs, on models; `tests.equality` has layouts, resumes and reshards."""
