"""Kernels over a vocabulary: cross-entropy and the gradient of an embedding, each with its reference."""
