"""Attention, forward and backward: in Triton, in Gluon for Hopper, and the reference."""
