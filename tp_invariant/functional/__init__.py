"""Autograd formulas, functions of tensors and groups: one operation in each file."""
