"""The draws of `tpi.sampling.Draws` in vLLM, and the log-probabilities of what was drawn, as a logits processor.

For each row it returns the log-probability of the drawn token, and -inf for all others. vLLM then takes the token as
the largest (temperature=0), and hands out the number as it is (logprobs_mode="processed_logits").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from ...functional.linear_cross_entropy import is_kept
from ...sampling.draws import Draws, request_key
from ...sampling.log_probs import log_softmax

KEY = "tp_invariant"  # in SamplingParams.extra_args
_GREEDY = {"seed": 0, "request": 0, "temperature": 0.0}
_TRUNCATED = ("top_k", "top_p", "min_p")


def check(params: SamplingParams) -> None:
    """Raises: ValueError: parameters with which vLLM would draw, or change probabilities, by itself."""
    options = (params.extra_args or {}).get(KEY, _GREEDY)
    faults = {
        f"temperature={params.temperature}: give it to tp_invariant.integrations.vllm.sampling_params": (
            params.temperature != 0
        ),
        "prompt_logprobs: they would be torch's: score prompts with tpi.token_log_probs": (
            params.prompt_logprobs is not None
        ),
        "a penalty": bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty not in (None, 1.0)
        ),
    }
    if named := [text for text, is_so in faults.items() if is_so]:
        raise ValueError("tp_invariant's draws in vLLM do not support " + "; ".join(named))
    _Request.of(options, 0, [])  # raises


@dataclass
class _Request:
    truncated: Draws | None  # says which ids may be drawn; None for all
    draws: Draws  # draws among them
    group: tuple  # requests of one group are drawn for together
    key: int
    prompt: int  # its number of tokens
    output: list[int]  # vLLM's own list, which grows

    @classmethod
    def of(cls, options: dict[str, Any], prompt: int, output: list[int]) -> _Request:
        others: dict[str, Any] = {name: options.get(name) for name in ("seed", "temperature", *_TRUNCATED)}
        key = request_key(options["seed"], options["request"])
        draws = Draws(options["seed"], temperature=options["temperature"])
        truncated = None if all(options.get(name) is None for name in _TRUNCATED) else Draws(**others)
        return cls(truncated, draws, tuple(others.values()), key, prompt, output)


class KeyedSampler(LogitsProcessor):
    """One of vLLM's logits processors. Requests without `sampling_params` of this package are greedy."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        check(sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, _Request] = {}  # by their rows

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, self._new)

    @staticmethod
    def _new(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Request:
        if prompt is None:
            raise ValueError("a request without token ids (embeddings as its prompt) has no positions to draw by")
        return _Request.of((params.extra_args or {}).get(KEY, _GREEDY), len(prompt), output)

    def apply(self, logits: Tensor) -> Tensor:
        requests = [self._requests.get(row) or _Request.of(_GREEDY, 0, []) for row in range(logits.shape[0])]
        groups: dict[tuple, list[int]] = {}  # vLLM tries its sampler without requests
        for row, request in enumerate(requests):
            groups.setdefault(request.group, []).append(row)
        result = torch.full_like(logits, -math.inf)
        for rows in groups.values():
            some = [requests[row] for row in rows]
            x, truncated, draws = logits[rows], some[0].truncated, some[0].draws
            if truncated is not None:
                x = x.masked_fill(~is_kept(truncated.support(x), 0, x.shape[1]), -math.inf)
            keys = torch.tensor([request.key for request in some])
            positions = torch.tensor([request.prompt + len(request.output) for request in some])
            ids = draws.draw(x, keys, positions).unsqueeze(1)
            log_probs = log_softmax(x, temperature=draws.temperature or 1.0).gather(1, ids)
            result[torch.tensor(rows, device=logits.device).unsqueeze(1), ids] = log_probs
        return result
