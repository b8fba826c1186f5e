"""Formulas on tensors.

This package does not depend on process groups, param groups or models. It imports only torch, and every other package
may use it.
"""
