"""Moves bytes between ranks and never adds any; who has ended, and what each rank is about to move."""
