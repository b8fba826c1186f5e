"""What travels between ranks: pieces of each matrix go to one owner, and pieces of its direction come back.

The room imports `storage` and `math`. An `Executor` is the only way from stored pieces to directions; `select` makes
the executors of a param group. The optimizer and the planner use these two, and `agreement`.
"""
