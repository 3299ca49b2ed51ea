"""Optimizers that need whole matrices, and gradient scaling, over sharded parameters."""

from . import step_checks as step_checks
from .grad_scaler import GradScaler
from .muon import Muon
from .trial import check

__all__ = ["GradScaler", "Muon", "check"]
