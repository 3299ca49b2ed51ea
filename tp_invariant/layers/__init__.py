"""Modules and parameters: how parameters are sharded, initialised and shared; gradient clipping."""

from . import adapters as adapters
