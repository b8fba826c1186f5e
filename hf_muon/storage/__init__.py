"""Describe which elements of a whole tensor a rank stores, by index arithmetic.

This package imports `math`, and does not communicate. Others may use `views` (the matrices of a stored tensor),
`regions` and `boxes` (what each rank stores), `tensors`, `dtensor` and `partitions`.
"""
