"""Kernels: plain functions of tensors that know nothing of ranks or layers.

The references and `tensor_core` are plain torch and run anywhere. The rest is Triton and
imports it at its top, so nothing here imports them: whoever runs a Triton kernel does.
"""
