"""Collectives that move bytes and never add; detection of ended ranks, and of ranks whose collectives differ."""
