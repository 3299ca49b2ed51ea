"""Draws in plain torch, for a CPU: the contract of draw.py, and its bits. Runs on CUDA tensors as well.

log is written out in fp64, one IEEE operation at a time: torch's own differs between devices, and on a CPU by an
element's place in a SIMD vector.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .reference_cross_entropy import _exp

# The generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # of the fp64 number nearest to sqrt(1/2)
_LN2_HIGH = 0.6931471805582987  # 38 bits, so that its products with exponents are exact
_LN2_LOW = 1.6465949582897082e-12
_TERMS = 10  # of the series of log; what is left out is below 2^-60
_REACH = 41.0  # more than the difference between the largest and the smallest Gumbel number, 40.4
_SLACK = 1e-6
_CHUNK = 1 << 14  # elements at a time, in a cache and of one thread; sets the speed only


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words of 32 bits, each in an int64, as those of the counter; key: int64, all 64 bits."""
    low, high = key & _WORD, (key >> 32) & _WORD
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        of_a, of_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # modulo 2^64, as unsigned: all bits of the products
        a, b = ((of_c >> 32) & _WORD) ^ b ^ low, of_c & _WORD
        c, d = ((of_a >> 32) & _WORD) ^ d ^ high, of_a & _WORD
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return a, b, c, d


def log(x: Tensor) -> Tensor:
    """The natural logarithm of fp64 numbers that are positive, finite and normal, within 2 units in the last place.

    x = m 2^e with m from sqrt(1/2) to sqrt(2), and log(m) = 2 artanh(s) = 2 s (1 + s^2/3 + s^4/5 + ..),
    s = (m - 1) / (m + 1).
    """
    bits = x.contiguous().view(torch.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    m, e = (bits - (exponent << 52)).view(torch.float64), exponent.double()
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = torch.full_like(s, 1 / (2 * _TERMS + 1))
    for k in range(_TERMS - 1, 0, -1):
        series = series * square
        series = series + 1 / (2 * k + 1)
    s = s + s
    tail = s * (square * series)
    tail = tail + e * _LN2_LOW
    return e * _LN2_HIGH + (s + tail)


def uniform(key: Tensor, index: Tensor) -> Tensor:
    """fp64 [..] between 0 and 1, of a key and position (int64 [.., 2]) and a vocabulary index (int64 [..]).

    An odd multiple of 2^-53 that 52 bits choose: Philox's words (0, 1) for an even index, (2, 3) for an odd one.
    """
    position = key[..., 1]
    counter = (position & _WORD, (position >> 32) & _WORD, index >> 1, torch.zeros_like(index))
    words = philox(key[..., 0], counter)
    odd = (index & 1).bool()
    high, low = torch.where(odd, words[2], words[0]), torch.where(odd, words[3], words[1])
    return (((high << 20) | (low >> 12)) * 2 + 1).double() * 2.0**-53


def largest(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """See draw.largest."""
    value = values.amax(0)
    none = torch.iinfo(torch.int64).max
    tied = torch.where(values == value, ids, none).amin(0)
    return torch.where(value.isnan(), ids[0], tied), value


def draw(x: Tensor, key: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """See draw.draw."""
    values = torch.full(x.shape, -math.inf, dtype=torch.float64, device=x.device)
    u = torch.ones_like(values)
    # no other id can have the largest value, whatever its Gumbel number
    rows, columns = ((x > -math.inf) & (x >= x.amax(1, keepdim=True) - _REACH)).nonzero(as_tuple=True)
    for r, c in zip(rows.split(_CHUNK), columns.split(_CHUNK), strict=True):
        u[r, c] = uniform(key[r], c + first)
        values[r, c] = x[r, c].double() - (-u[r, c].log()).log()  # to far less than _SLACK
    near = (values >= values.amax(1, keepdim=True) - _SLACK) & (values > -math.inf)
    rows, columns = near.nonzero(as_tuple=True)
    values.fill_(-math.inf)
    values[rows, columns] = x[rows, columns].double() - log(-log(u[rows, columns]))
    values.masked_fill_(x.isnan(), math.nan)
    return largest(values.T, torch.arange(first, first + x.shape[1], device=x.device).unsqueeze(1))


def exp_weights(x: Tensor, terms: int) -> Tensor:
    """exp of fp32 numbers x <= 0 in fixed point, int64, so that `terms` of them add up exactly; may overwrite x.

    The same bits on a CPU and on CUDA.
    """
    return _exp(x).mul_(2.0 ** (62 - terms.bit_length())).to(torch.int64)
