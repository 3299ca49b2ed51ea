"""Draws of tokens that depend on nothing but a seed, a request, a position and the logits.

A token is the id with the largest sum of its score and a Gumbel number, which is distributed as softmax of the scores.
The number is a function of the seed, the request, the position and the id (kernels/vocabulary/draw.py). So a text is
the same at every degree, in every batch and order, with left padding, and after a restart in the middle.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.elementwise import inside_a_layer
from ..kernels.dtypes import DTYPES
from ..kernels.select import select
from .log_probs import log_softmax

Request = str | int


def request_key(seed: int, request: Request, copy: int = 0) -> int:
    """The key of a request's draws: 64 bits, as a signed number, of BLAKE2b.

    Args:
        seed: of the run.
        request: what the request is called: a text, or a number, which is another request than the text of its digits.
        copy: of a request that is sampled several times, which sample.

    Raises:
        TypeError: a seed or copy that is no int, or a request that is neither a str nor an int.
    """
    for name, value, kinds in (("seed", seed, int), ("request", request, (str, int)), ("copy", copy, int)):
        if not isinstance(value, kinds) or isinstance(value, bool):
            allowed = "an int or a str" if name == "request" else "an int"
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: it must be {allowed}")
    text = f"{seed} {copy} {'text' if isinstance(request, str) else 'number'} {request}"
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )


class Draws:
    """Draws tokens from logits, each by its request and position alone; the same on a CPU and a GPU for equal logits.

    The logits are divided by the temperature in fp32. Then top_k, top_p and min_p choose the ids that may be drawn,
    each among those that the one before it kept. Ids are ordered by score, the highest first, and equal scores by id,
    the lowest first:

    - top_k keeps the first k, also where more have the score of the last of them;
    - top_p keeps an id if those before it have less than top_p of the probability, summed in fixed point;
    - min_p keeps an id if its score is at most log(1 / min_p) below the highest.

    Args:
        seed: of the run.
        temperature: at least 0; with 0 the id with the highest score is taken, the lowest of equal ones.
        top_k: at least 1, or None for all.
        top_p: above 0 and at most 1; 1.0 or None for all.
        min_p: from 0 to 1; 0.0 or None for all.

    Raises:
        TypeError: a seed that is no int.
        ValueError: an option out of range.

    The sum of scores and Gumbel numbers is due to Gumbel, 1954 (Yellott, 1977); the generator is Philox4x32-10 of
    Salmon et al., SC 2011.
    """

    def __init__(
        self, seed: int, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
        min_p: float | None = None,
    ) -> None:  # fmt: skip
        request_key(seed, 0)  # raises
        for name, value, right, allowed in (
            ("temperature", temperature, 0 <= temperature < 1e38, "at least 0 and below 1e38"),
            (
                "top_k",
                top_k,
                top_k is None or (type(top_k) is int and top_k >= 1),
                "a whole number from 1, or None",
            ),
            ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or None"),
            ("min_p", min_p, min_p is None or 0 <= min_p <= 1, "from 0 to 1, or None"),
        ):
            if not right:
                raise ValueError(f"{name}={value!r} is out of range: it must be {allowed}")
        self.seed, self.temperature, self.top_k = seed, float(temperature), top_k
        self.top_p = None if top_p == 1 else top_p
        self.min_p = min_p or None

    def draw(self, logits: Tensor, requests: Tensor | Sequence[Request], positions: Tensor | Sequence[int]) -> Tensor:
        """The token at each position -> int64 [R].

        Args:
            logits: bfloat16, float16 or float32 [R, V], whole on every rank.
            requests: R requests, or their keys (`request_key`) as int64 [R].
            positions: int64 [R]: how many tokens of the request, its prompt's among them, are before the one drawn.

        Raises:
            TypeError, ValueError: a dtype or a shape that is not one of these; a row with NaN or inf, or -inf alone.
        """
        with torch.no_grad(), inside_a_layer():
            x = self._scores(logits)
            if not isinstance(requests, Tensor):
                requests = torch.tensor(
                    [request_key(self.seed, request) for request in requests], dtype=torch.int64, device="cpu"
                )
            if not isinstance(positions, Tensor):
                positions = torch.tensor(positions, device="cpu")
            for name, of_rows in (("requests", requests), ("positions", positions)):
                if of_rows.shape != x.shape[:1] or of_rows.dtype != torch.int64:
                    raise ValueError(
                        f"{name} are {of_rows.dtype} of shape {tuple(of_rows.shape)} for logits {tuple(x.shape)}: they "
                        f"must be int64 [{x.shape[0]}], one for each row"
                    )
            if self.temperature == 0:
                return _first_of_highest(x)[:, 0]
            if (self.top_k, self.top_p, self.min_p) != (None, None, None):
                ids, scores = self._kept(x)
                x = x.new_full((x.shape[0], x.shape[1] + 1), -math.inf)  # what is not kept goes to the last column
                x = x.scatter_(1, ids.masked_fill(ids < 0, x.shape[1] - 1), scores)[:, :-1]
            key = torch.stack([requests.to(x.device), positions.to(x.device)], dim=1)
            drawn: Tensor = select("draw", x.device.type).draw(x, key, 0)[0]
            return drawn

    def support(self, logits: Tensor) -> Tensor:
        """The ids that may be drawn -> int64 [R, S], by score, filled up with -1; S is the largest number of a row.

        `token_log_probs(.., support=..)` scores tokens among them.

        Args:
            logits: bfloat16, float16 or float32 [R, V], whole on every rank.

        Raises:
            TypeError, ValueError: as for `draw`.
        """
        with torch.no_grad(), inside_a_layer():
            x = self._scores(logits)
            if self.temperature == 0:
                return _first_of_highest(x)
            ids, _ = self._kept(x)
            return ids[:, : int((ids >= 0).sum(1).max())] if x.shape[0] else ids

    def _scores(self, logits: Tensor) -> Tensor:
        """fp32 [R, V], without -0.0."""
        if logits.dtype not in DTYPES:
            raise TypeError(f"logits are {logits.dtype}: they must be one of {', '.join(map(str, DTYPES))}")
        if logits.dim() != 2 or not logits.shape[1]:
            raise ValueError(f"logits have shape {tuple(logits.shape)}: it must be [R, V]")
        x = logits.float()
        if self.temperature not in (0.0, 1.0):
            x = x / x.new_full((), self.temperature)  # torch on CUDA multiplies by the inverse of a number of Python
        wrong = ~x.amax(1).isfinite()
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"row {row} of the logits has the highest score {x[row].amax().item()} at temperature "
                f"{self.temperature}, so no token can be drawn from it: rows must be without NaN and inf, and may have "
                "-inf for some ids but not for all"
            )
        return x + 0.0

    def _kept(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(ids [R, S], scores [R, S]), ordered; id -1 and score -inf at the end."""
        ids = None if self.top_k is None or self.top_k >= x.shape[1] else _highest(x, self.top_k)
        scores, order = (x if ids is None else x.gather(1, ids)).sort(dim=1, descending=True, stable=True)
        ids = order if ids is None else ids.gather(1, order)
        keep = scores > -math.inf
        if self.top_p is not None:
            weights = select("draw", x.device.type).exp_weights(scores - scores[:, :1], x.shape[1])
            sums = weights.cumsum(1)
            limit = (sums[:, -1:].double() * self.top_p).ceil().to(torch.int64)
            keep &= sums - weights < limit
        if self.min_p is not None:
            keep &= scores - scores[:, :1] >= math.log(self.min_p)
        return ids.masked_fill(~keep, -1), scores.masked_fill(~keep, -math.inf)


def _first_of_highest(x: Tensor) -> Tensor:
    """The lowest id with the highest score, int64 [R, 1]."""
    ids = torch.arange(x.shape[1], device=x.device)
    return torch.where(x == x.amax(1, keepdim=True), ids, x.shape[1]).amin(1, keepdim=True)


def _highest(x: Tensor, k: int) -> Tensor:
    """The ids of the k highest scores of each row, the lowest ones where scores are equal; ascending, int64 [R, k]."""
    least = x.topk(k, dim=1).values.amin(1, keepdim=True)
    above, equal = x > least, x == least
    room = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))).nonzero()[:, 1].view(-1, k)


class KeyedDraws:
    """Draws the tokens of transformers' `generate` by `Draws`: one of its logits processors, and its last.

        draws = tpi.sampling.KeyedDraws(seed, ["a", "b"], attention_mask=mask, temperature=0.8, top_p=0.95)
        model.generate(ids, attention_mask=mask, logits_processor=[draws], do_sample=False)
        model.generate_batch([ids_of_a, ids_of_b], logits_processor=[draws])  # a parallelized model's: the same texts

    The scores that it returns are 0 for the drawn token and -inf for all others. With do_sample=True transformers' own
    temperature, top_k (50 unless it is given) and top_p act on the logits before it, so pass top_k=0 then. Each
    `generate` needs one of its own, with the same seed and requests on every rank. Of num_return_sequences=n, which
    needs do_sample=True, the n texts of a prompt have keys of their own: `request_key(seed, request, copy)`.

    Args:
        seed: of the run.
        requests: the name of each prompt's request. A prompt that goes on with an earlier text has that text's name.
        attention_mask: what `generate` gets: [len(requests), length of the prompts], 0 for the padding at the left. May
            be None for one request without padding, and for `generate_batch`.
        keep_log_probs: put the log-probability of each drawn token into `log_probs`, a list with a step's fp32 [rows]
            in each place: those of the scores that it gets, over the whole vocabulary, at its temperature. They have
            the bits of `token_log_probs` with the same temperature.
        options: temperature, top_k, top_p and min_p of `Draws`.

    Raises:
        TypeError: as `request_key`.
        ValueError: requests or an attention_mask that do not fit, an option out of range; in `generate` also rows that
            are no multiple of the requests, other prompts than before, beam search, or an encoder-decoder model.
    """

    def __init__(
        self, seed: int, requests: Sequence[Request], *, attention_mask: Tensor | None = None, temperature: float = 1.0,
        top_k: int | None = None, top_p: float | None = None, min_p: float | None = None, keep_log_probs: bool = False,
    ) -> None:  # fmt: skip
        self.log_probs: list[Tensor] | None = [] if keep_log_probs else None
        self._draws = Draws(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        self._requests = [requests] if isinstance(requests, str) else list(requests)
        for request in self._requests:
            request_key(seed, request)  # raises
        count = len(self._requests)
        if not count or len(set(self._requests)) < count:
            raise ValueError(f"requests={self._requests} must name at least one request, and each once")
        self._masked = attention_mask is not None
        mask = torch.ones(count, 1, dtype=torch.bool, device="cpu") if attention_mask is None else attention_mask != 0
        if mask.dim() != 2 or mask.shape[0] != count or not mask[:, -1:].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)} for {count} requests: it must be [{count}, length], "
                "with zeros at the left alone"
            )
        self._width = None if attention_mask is None else mask.shape[1]
        self._padding = (~mask).sum(1)  # of each request; of each row: _paddings
        self._prompts: Tensor | None = None
        self._keys = self._paddings = torch.empty(0, dtype=torch.int64, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows, length = input_ids.shape
        count = len(self._requests)
        if not self._masked and count > 1:
            raise ValueError(
                f"attention_mask=None with {count} requests: pass the mask that generate gets, by which positions are "
                "counted without padding"
            )
        copies, width = rows // count, self._width or length
        if rows % count or rows != scores.shape[0] or scores.dim() != 2 or not 1 <= width <= length:
            raise ValueError(
                f"KeyedDraws has {count} requests with prompts of {width} tokens, and is called with the texts "
                f"{tuple(input_ids.shape)} and scores {tuple(scores.shape)}: there must be as many rows, or a multiple "
                "(num_return_sequences), and prompts that are given as input_ids to a decoder-only model"
            )
        prompts = input_ids[::copies, :width]
        if self._prompts is None:
            self._width, self._prompts = width, prompts.clone()
        if not torch.equal(prompts, self._prompts.to(prompts.device)):
            raise ValueError(
                "KeyedDraws is called with other prompts than before, which would be drawn by the same numbers: make a "
                "new one for each generate, with requests of other names"
            )
        if length == width and copies > 1 and bool((scores.float().logsumexp(1).abs() < 1e-3).all()):
            raise ValueError(
                "KeyedDraws gets log-probabilities in place of logits, as beam search computes them: it draws tokens, "
                "so num_beams must be 1"
            )
        if len(self._keys) != rows:
            names = [request_key(self._draws.seed, name, copy) for name in self._requests for copy in range(copies)]
            self._keys = torch.tensor(names, dtype=torch.int64, device=scores.device)
            self._paddings = self._padding.to(scores.device).repeat_interleave(copies)
        drawn = self._draws.draw(scores, self._keys, length - self._paddings)
        if self.log_probs is not None:
            of_all = log_softmax(scores, temperature=self._draws.temperature)
            self.log_probs.append(of_all.gather(1, drawn.unsqueeze(1))[:, 0])
        return torch.full_like(scores, -math.inf).scatter_(1, drawn.unsqueeze(1), 0.0)

    # --- continuous batching ----------------------------------------------------------------------------------------

    def for_engine(self) -> tuple[list[str], Any, Callable[[str, int], list[str]]]:
        """The engine's names of the requests, its processor, and the names of a request's several texts."""
        from .engine_draws import EngineDraws, request_id, texts_of

        names = [request_id(self._draws.seed, request) for request in self._requests]
        return names, EngineDraws(self._draws), texts_of
