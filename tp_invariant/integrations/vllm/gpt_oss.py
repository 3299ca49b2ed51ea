"""vLLM's gpt_oss, each of whose weights is loaded by its own weight_loader.

vLLM's copies a rank's part of some weights into the parameters by itself: of the down projections the columns, and the
attention sinks. It would also drop them when weights are sent to the running engine, because vLLM's `reload_weights`
sees only what a weight_loader loads. So experts are handed on one by one, for which vLLM has names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models import gpt_oss
from vllm.model_executor.utils import set_weight_attrs


def _load_heads(param: nn.Parameter, loaded_weight: Tensor) -> None:
    """param [h/P] from the whole [h]."""
    param.data.copy_(loaded_weight.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()])


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        for layer in self.model.layers:
            set_weight_attrs(layer.attn.sinks, {"weight_loader": _load_heads})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters, sinks = dict(self.named_parameters()), set()

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                before, is_expert, after = name.partition(".mlp.experts.")
                if is_expert:
                    yield from ((f"{before}{is_expert}{i}.{after}", one) for i, one in enumerate(weight))
                elif name.endswith(".sinks"):
                    own = name.replace(".self_attn.", ".attn.")
                    parameters[own].weight_loader(parameters[own], weight)
                    sinks.add(own)
                else:
                    yield name, weight

        return super().load_weights(others()) | sinks
