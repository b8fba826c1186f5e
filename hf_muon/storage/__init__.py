"""Where a parameter lies: which elements of a whole tensor a rank stores, as facts and index arithmetic.

The room imports `math`; it sends nothing and makes no process group. Rooms above may use `views` (which matrices a
stored tensor holds), `regions`, `boxes` and `shared` (what each rank stores), `tensors`, `dtensor` and `partitions`.
"""
