"""Kernels of mixtures of experts, each with its reference: products by expert, routing of rows."""
