"""Runnable examples; installed so that `tp-invariant demo` finds them."""
