"""Where a parameter lies, as facts and index arithmetic: nothing is sent here.

The room imports `math`. A region says which elements of a whole tensor a rank stores, a view says which matrices the
tensor holds. All rooms above may use both.
"""
