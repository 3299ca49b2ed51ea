"""Shared by all wings, without communication: the mode, layouts, bit comparison, custom operators, processes."""
