"""Log-probabilities of tokens, and draws that depend on nothing but a seed, a request and a position."""

from .draws import Draws, KeyedDraws, request_key
from .log_probs import linear_cross_entropy, log_softmax, token_log_probs

__all__ = ["Draws", "KeyedDraws", "linear_cross_entropy", "log_softmax", "request_key", "token_log_probs"]
