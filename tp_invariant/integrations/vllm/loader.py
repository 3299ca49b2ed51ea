"""The load format "tp_invariant": reads weights as another one does, and looks at the model before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import vllm
from torch import nn
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from ...core.mode import is_tp_invariant_mode_enabled
from . import LOAD_FORMAT, SUPPORTED


def check_version() -> None:
    """Raises: RuntimeError: a version or platform that this package does not know."""
    if not vllm.__version__.startswith(SUPPORTED):
        raise RuntimeError(f"vLLM {vllm.__version__} is not supported by tp_invariant: install {SUPPORTED[0]}x")
    if not current_platform.is_cpu():
        raise RuntimeError(
            f"vLLM on {current_platform.device_name!r} is not supported by tp_invariant yet: only on CPUs"
        )


class Loader(BaseModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        weights = extra.pop("load_format", "auto")
        self.weights = get_model_loader(replace(load_config, load_format=weights, model_loader_extra_config=extra))
        files = weights if hasattr(self.weights, "get_all_weights") else "auto"  # "dummy" reads none
        self.files = get_model_loader(replace(load_config, load_format=files, model_loader_extra_config=extra))

    def download_model(self, model_config: Any) -> None:
        self.weights.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        self.weights.load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
        """(name, tensor) of all weights, for vLLM's `reload_weights`."""
        return self.files.get_all_weights(model_config, model)

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """The model, if all of it keeps the contract.

        Raises:
            RuntimeError: the mode is off in this process; options and layers that would break the contract, all of
                them at once.
        """
        if not is_tp_invariant_mode_enabled():
            raise RuntimeError(
                f"load_format={LOAD_FORMAT!r} needs TP_INVARIANT_MODE=1 in the environment of every rank"
            )
        from .checks import faults_of_config, faults_of_model

        faults = faults_of_config(vllm_config)
        if not faults:
            model = super().create_model(vllm_config, model_config, prefix)
            faults = faults_of_model(model)
        if faults:
            raise RuntimeError("tp_invariant cannot keep its contract in vLLM: " + "; ".join(faults))
        return model


def register() -> None:
    register_model_loader(LOAD_FORMAT)(Loader)
