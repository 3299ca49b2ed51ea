"""What clipping does with gradients: sums of squares, their fold, scaling, digests; the reference."""
