"""Switches of the whole process that make a run repeat itself."""

from .settings import Report, Row, checkpoint_kwargs, deterministic, enable, report

__all__ = ["Report", "Row", "checkpoint_kwargs", "deterministic", "enable", "report"]
