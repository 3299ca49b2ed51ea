"""What is computed row by row: norms, softmax, sums; each with its reference."""
