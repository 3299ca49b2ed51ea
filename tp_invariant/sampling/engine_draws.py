"""Keyed draws inside of transformers' continuous batching: what `KeyedDraws` gives to `generate_batch`."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from .draws import Draws, Request, request_key
from .log_probs import log_softmax

_FORK = "__child#"  # transformers names the further texts of a prompt after its request, from 0 on


def request_id(seed: int, request: Request) -> str:
    """What the engine calls a request, so that every rank knows its key."""
    return json.dumps([seed, request])


def texts_of(request: str, copies: int) -> list[str]:
    """The engine's names of a request's texts, in the order of their copies."""
    return [request, *(f"{request}{_FORK}{i}" for i in range(copies - 1))]


class EngineDraws(ContinuousBatchingLogitsProcessor):
    """One of the engine's processors: scores of 0 for the drawn token and -inf for all others.

    The engine prepares a step before it computes it, perhaps several, and on each rank in the same order.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.supported_kwargs, self.ignored_kwargs = {}, ()  # a request has no options of its own
        self._steps: deque[list[tuple[str, int]]] = deque()  # of each row: its request, and the tokens before it
        self._found: dict[str, dict[int, float]] = {}  # log-probabilities of each text, by position

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Nothing that the step needs: a row has room for 32 bits, and a key has 64."""
        self._steps.append([(each.state.request_id, each.state.position_offset) for each in requests_with_new_token])
        return torch.zeros(len(requests_with_new_token), dtype=torch.int32, device="cpu")

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        rows = self._steps.popleft()
        result = torch.full_like(scores, -torch.inf)
        result[len(rows) :] = 0.0
        if rows:
            x, (requests, positions) = scores[: len(rows)], zip(*rows, strict=True)
            keys = torch.tensor([_key(request) for request in requests], dtype=torch.int64, device=x.device)
            drawn = self.draws.draw(x, keys, torch.tensor(positions, dtype=torch.int64, device="cpu")).unsqueeze(1)
            result[: len(rows)].scatter_(1, drawn, 0.0)
            if self.draws.temperature:
                log_probs = log_softmax(x, temperature=self.draws.temperature).gather(1, drawn)[:, 0]
                # by position: the engine writes the end of a text again if it has taken its pages away
                for request, position, log_prob in zip(requests, positions, log_probs.tolist(), strict=True):
                    self._found.setdefault(request, {})[position] = log_prob
        return result

    def log_probs_of(self, request: str) -> list[float]:
        """Those of a finished text's drawn tokens, which are then forgotten. Empty at temperature 0."""
        return [found for _, found in sorted(self._found.pop(request, {}).items())]


def _key(request: str) -> int:
    name, _, copy = request.partition(_FORK) if _FORK in request else (request, "", "-1")
    try:
        seed, wanted = json.loads(name)
        return request_key(seed, wanted, int(copy) + 1)
    except (TypeError, ValueError):
        raise ValueError(
            f"request_id={request!r}: this engine draws by keys, and takes requests from generate_batch alone, with "
            "logits_processor=[KeyedDraws(..)]"
        ) from None
