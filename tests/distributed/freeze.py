"""Exclude what has been imported from garbage collection, in a process to fork ranks from: import this module last."""

import gc

gc.collect()
gc.freeze()
