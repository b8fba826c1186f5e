"""Helpers of the tests and of benchmarks/, which count and pretend in the same way."""
