"""Kernels: plain functions of tensors that know nothing of ranks or layers.

`reference` is plain torch and runs anywhere; the other modules are Triton and import it at their top, so nothing here
imports them: whoever runs a Triton kernel does.
"""
