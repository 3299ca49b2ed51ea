"""Log-probabilities of tokens, and draws that depend on nothing but a seed, a request and a position."""

from .log_probs import linear_cross_entropy, log_softmax, token_log_probs

__all__ = ["linear_cross_entropy", "log_softmax", "token_log_probs"]
