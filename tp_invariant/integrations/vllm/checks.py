"""What of vLLM's configuration, and which layers of its model, would break the contract."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from .experts import MoERunner
from .layers import Invariant

# modules of torch's and vLLM's without sums and without functions that depend on an element's place
# (RoutedExperts holds weights, which MoERunner uses)
_PLAIN = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity, nn.Dropout, ApplyRotaryEmb, RoutedExperts)
_WATCHED = ("vllm.model_executor.layers", "torch.nn.modules")


def faults_of_config(config: Any) -> list[str]:
    """config: a VllmConfig."""
    parallel, model = config.parallel_config, config.model_config
    faults = {
        "compiled code fuses what must be rounded: pass enforce_eager=True": not model.enforce_eager,
        f"quantization={model.quantization!r} is not supported: load weights in bfloat16, float16 or float32": (
            config.quant_config is not None
        ),
        "LoRA is not supported": config.lora_config is not None,
        "speculative decoding is not supported": config.speculative_config is not None,
        "pipeline parallelism is not supported": parallel.pipeline_parallel_size > 1,
        "expert parallelism is not supported": parallel.enable_expert_parallel,
        "VLLM_BATCH_INVARIANT=1 replaces kernels, too: unset it": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
        f"logprobs_mode={model.logprobs_mode!r}: log-probabilities would be torch's: pass **engine_arguments()": (
            model.logprobs_mode != "processed_logits"
        ),
    }
    return [text for text, is_so in faults.items() if is_so]


def faults_of_model(model: nn.Module) -> list[str]:
    """The layers that are not this package's, by name."""
    faults = []
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, Attention):
            if not isinstance(module.impl, Invariant):
                faults.append(f"{name} computes attention by {type(module.impl).__name__}")
        elif isinstance(module, MoERunner):
            faults += [f"{name} {text}, which is not supported" for text in module.faults()]
        elif kind.__module__.startswith(_WATCHED) and not isinstance(module, (Invariant, *_PLAIN)):
            faults.append(f"{name} is vLLM's or torch's {kind.__name__}")
    return faults
