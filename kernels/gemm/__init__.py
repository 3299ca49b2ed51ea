"""The matrix product: the Triton kernels, their tiles, the reference, and a model of the tensor core."""
