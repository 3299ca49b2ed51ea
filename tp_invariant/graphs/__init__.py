"""Layers as CUDA graphs."""

from .capture import GraphedLayers, graph_layers

__all__ = [
    "GraphedLayers",
    "graph_layers",
]
