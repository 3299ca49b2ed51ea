"""What benchmarks/tune_gemm.py measured on an H200 (sm90), bf16: generated, do not edit. Sets speed, never bits.

A configuration is (block_m, block_n, block_k, num_warps, num_stages, group_m, halves).
"""

MEASURED_MULTIPROCESSORS = 132
FEW_ROWS = 128  # up to so many rows a product is bound by reading b
LAYOUTS = {(False, True): "fwd", (False, False): "dgrad", (True, False): "wgrad", (True, True): "wgrad"}

# layout: (configuration, microseconds of a round of tiles, microseconds more for each k)
_LARGE = (
    ((128, 256, 64, 8, 3, 4, False), 4.0, 0.0120),
    ((128, 256, 64, 8, 4, 4, True), 4.0, 0.0121),
    ((128, 128, 64, 4, 4, 8, False), 3.0, 0.0068),
    ((128, 192, 64, 8, 4, 8, True), 3.5, 0.0093),
)
ROUNDS = {
    "few rows": (
        ((16, 32, 256, 4, 5, 8, False), 2.0, 0.0030),
        ((64, 48, 128, 4, 6, 8, True), 2.0, 0.0045),
        ((64, 64, 128, 4, 6, 8, False), 2.0, 0.0050),
    ),
    "fwd": _LARGE,
    "dgrad": _LARGE,
    "wgrad": _LARGE,
}

# (layout, M, N, K): the fastest configuration
MEASURED: dict = {}
