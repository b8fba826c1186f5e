"""Log lines, metrics of steps, and the page that shows them. Metrics are off by default.

Of other packages, this one imports only torch. Others log through `log`, and pass results of a step to the metrics.
"""
