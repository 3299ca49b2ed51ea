"""Switches of the whole process that make a run repeat itself."""

from .switches import Report, Row, checkpoint_kwargs, deterministic, enable, report

__all__ = [
    "Report",
    "Row",
    "checkpoint_kwargs",
    "deterministic",
    "enable",
    "report",
]
