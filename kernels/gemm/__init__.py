"""The matrix product: the Triton kernels, their tiles, the reference, and the tensor core as a reference."""
