"""Log-probabilities of tokens, and draws that depend on nothing but a seed, a request and a position."""

__all__: list[str] = []
