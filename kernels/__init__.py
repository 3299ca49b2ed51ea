"""Kernels: plain functions of tensors that know nothing of ranks or layers.

The references and `tensor_core` are plain torch and run anywhere. The other modules import
Triton at the top, so this file does not import them: code that runs a Triton kernel does.
"""
