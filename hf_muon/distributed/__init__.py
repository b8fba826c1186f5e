"""Communication: ranks send pieces of each update to the owner of the matrix, which returns pieces of the direction.

This package imports `storage` and `math`. Others use `exchange.Exchange`, which turns stored pieces into directions,
`ranks` (messages before a step) and `groups` (process groups).
"""
