"""What travels between ranks: pieces of each update go to the matrix's one owner, pieces of its direction come back.

The room imports `storage` and `math`. An `Exchange` is the only way from stored pieces to directions. Rooms above use
it, `ranks` (what ranks tell one another before a step) and `groups` (process groups).
"""
