"""Formulas: tensors in, tensors out.

Nothing here knows a process group, a param group or a model. The room imports torch alone. All other rooms may use it.
"""
