"""A decoder written with this library's layers, and its training loop. docs/layers_by_hand.md explains it.

    .venv/bin/torchrun --nproc-per-node 2 examples/layers_by_hand.py

prints the losses and a digest, the same at 1, 2 and 4 ranks. With TP_INVARIANT_MODE=0 the digests differ.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import tp_invariant as tpi

VOCABULARY, HIDDEN, FFN, LAYERS = 256, 64, 128, 2  # sizes of the whole model, on one rank and on four
HEADS, KV_HEADS, HEAD = 8, 4, 8


class Block(nn.Module):
    """x [B, S/P, HIDDEN] -> the same."""

    def __init__(self, tp, place):
        super().__init__()
        shared = dict(tp_group=tp, sequence_parallel=True, sequence_dim=1, bias=False, **place)
        column = dict(parallel_mode="column", normalization="RMSNorm", **shared)
        row = dict(parallel_mode="row", **shared)
        self.sizes = HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD  # of q, k and v
        self.qkv = tpi.LayerNormLinear(HIDDEN, sum(self.sizes), partition_sizes=self.sizes, **column)
        self.out = tpi.Linear(HEADS * HEAD, HIDDEN, **row)
        self.gate_up = tpi.LayerNormLinear(HIDDEN, 2 * FFN, partition_stride=2, **column)
        self.down = tpi.Linear(FFN, HIDDEN, **row)
        self.degree = tp.size()

    def forward(self, x, cos, sin):
        qkv = self.qkv(x).split([size // self.degree for size in self.sizes], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in qkv)  # [B, this rank's heads, S, HEAD]
        q, k = tpi.rotary_embedding(q, k, cos, sin)
        y = tpi.attention(q, k, v, causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(tpi.gated_activation(self.gate_up(x), activation="silu"))


class Decoder(nn.Module):
    """tokens [B, S], the same on every rank -> logits [B, S, VOCABULARY/P]."""

    def __init__(self, tp, **place):
        super().__init__()
        tokens = dict(tp_group=tp, sequence_parallel=True, sequence_dim=1, **place)
        self.embedding = tpi.VocabParallelEmbedding(VOCABULARY, HIDDEN, **tokens)
        self.blocks = nn.ModuleList(Block(tp, place) for _ in range(LAYERS))
        self.head = tpi.LayerNormLinear(
            HIDDEN, VOCABULARY, bias=False, parallel_mode="column", normalization="RMSNorm", **tokens
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        cos, sin = angles(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(x)


def angles(length, x):
    """cos and sin [1, S, HEAD] of rotary embeddings, of all positions, in x's dtype and on its device."""
    frequencies = 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
    angle = torch.outer(torch.arange(length), frequencies).repeat(1, 2)[None]
    return angle.cos().to(x), angle.sin().to(x)


def batch(step, device):
    """tokens and targets [8, 16], the same on every rank: texts that count from a random token."""
    start = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    text = ((start + torch.arange(17)) % VOCABULARY).to(device)
    return text[:, :-1], text[:, 1:]


def train(tp, steps=4, **place):
    """The losses, and the trained model."""
    torch.manual_seed(0)  # the same on every rank
    model = Decoder(tp, **place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step, model.embedding.weight.device)
        loss = tpi.vocab_parallel_cross_entropy(model(tokens), targets, tp_group=tp)
        optimizer.zero_grad()
        loss.backward()
        tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp)
        optimizer.step()
        losses.append(loss.detach())
    return losses, model


if __name__ == "__main__":
    os.environ.setdefault("TP_INVARIANT_MODE", "1")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    losses, model = train(dist.group.WORLD, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    digest = tpi.testing.digest((losses, tpi.testing.full_parameters(model)))  # on every rank: it gathers
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step} loss {loss.item():.6f}")
        print("digest", digest, flush=True)
    dist.destroy_process_group()
