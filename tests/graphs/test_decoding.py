"""Decoding with a cache of fixed size, as a CUDA graph needs it: the bits of a whole forward, captured and not."""

import pytest
import torch
from torch import nn

import tp_invariant as tpi
from tp_invariant.testing import assert_bitwise_equal, digest, run_ranks, wide_randn

BATCH, HIDDEN, HEADS, TOKENS, MOST = 2, 64, 4, 9, 24


class Decoder(nn.Module):
    """x [B, S, hidden] -> x plus attention; with `position`, of one token after those that the cache holds."""

    def __init__(self, tp_group, **place):
        super().__init__()
        options = dict(tp_group=tp_group, bias=False, **place)
        self.qkv = tpi.Linear(HIDDEN, 3 * HIDDEN, parallel_mode="column", partition_stride=3, **options)
        self.out = tpi.Linear(HIDDEN, HIDDEN, parallel_mode="row", **options)
        self.cache = torch.zeros(2, HEADS // self.qkv.group.size, BATCH, MOST, HIDDEN // HEADS, **place)

    def forward(self, x, position=None):
        q, k, v = (t.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if position is None:
            y = tpi.attention(q, k, v, causal=True)
        else:
            for held, new in zip(self.cache, (k, v), strict=True):
                held.index_copy_(2, position, new.transpose(0, 1))
            # of each row of the cache the keys that there are, then the others, which no query sees
            starts = MOST * torch.arange(BATCH + 1, device=x.device)
            cu_k = torch.stack((starts, starts + position + 1), dim=1).flatten()[:-1]
            cu_q = torch.arange(1, 2 * BATCH + 2, device=x.device) // 2
            y = tpi.attention(
                q.transpose(0, 2), *self.cache.flatten(2, 3).unsqueeze(1), causal=True, cu_seqlens_q=cu_q.int(),
                cu_seqlens_k=cu_k.int(), max_seqlen_q=1, max_seqlen_k=MOST,
            ).transpose(0, 2)  # fmt: skip
        return x + self.out(y.transpose(1, 2).flatten(2))


def decoded(tp_group, device, captured, mode=True):
    """The whole forward, and the same tokens one by one."""
    torch.manual_seed(0)
    place = dict(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    with tpi.set_tp_invariant_mode(mode), torch.no_grad():
        decoder = Decoder(tp_group, **place)
        xs = wide_randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), spread=2).to(**place)
        whole, x = decoder(xs), xs[:, :1].clone()
        position = torch.zeros(1, dtype=torch.int64, device=device)
        y = torch.empty_like(x)

        def step():
            y.copy_(decoder(x, position))

        run, graph = step, None
        if captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            run = graph.replay
        ys = []
        for i in range(TOKENS):
            x.copy_(xs[:, i : i + 1])
            position.fill_(i)
            run()
            ys.append(y.clone())
        del run, graph
        return whole.cpu(), torch.cat(ys, dim=1).cpu()


def check(degree, device, captured):
    ((want, _),) = run_ranks(decoded, 1, device, False, device=device)
    for whole, steps in run_ranks(decoded, degree, device, captured, device=device):
        assert_bitwise_equal(whole, want)
        assert_bitwise_equal(steps, want)


def test_step_by_step():
    check(2, "cpu", False)
    off = [run_ranks(decoded, degree, "cpu", False, False, device="cpu")[0] for degree in (1, 2)]
    assert digest(off[0]) != digest(off[1]), "the control: without the mode the degree shows"


@pytest.mark.gpu
@pytest.mark.parametrize("degree", (1, 2))
def test_captured_on_gpus(degree):
    if degree > torch.cuda.device_count():
        pytest.skip(f"needs {degree} GPUs")
    check(degree, "cuda", True)
