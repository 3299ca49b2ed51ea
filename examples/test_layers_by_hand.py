"""The bits and the values of layers_by_hand.py. Copy both files: `pytest test_layers_by_hand.py` needs no GPU."""

import layers_by_hand as by_hand
import torch
import torch.nn.functional as F
from layers_by_hand import FFN, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
from torch import nn

import tp_invariant as tpi


def trained(tp):
    """What may not depend on the degree; the logits of all ranks make the whole ones."""
    losses, model = by_hand.train(tp, steps=2)
    return losses, tpi.testing.full_grads(model), tpi.testing.full_parameters(model)


def test_the_same_bits_at_every_degree():
    """Its control runs all of this with the mode off, and fails where no bit differs."""
    tpi.testing.assert_tp_invariant(trained, degrees=(1, 2, 4), device="cpu")


# --- the values, compared with a model of plain torch -----------------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        def turned(t):
            first, second = t.chunk(2, dim=-1)
            return t * cos + torch.cat((-second, first), dim=-1) * sin

        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN, eps=1e-5), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        cos, sin = by_hand.angles(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def from_plain(plain):
    """A plain model's tensors by name -> the same tensors as layers_by_hand.Decoder names and stacks them."""
    full = {
        "embedding.weight": plain["embedding.weight"],
        "head.layer_norm_weight": plain["norm.weight"],
        "head.weight": plain["head.weight"],
    }
    for i in range(LAYERS):
        at = f"blocks.{i}."
        full[at + "qkv.layer_norm_weight"] = plain[at + "norm1.weight"]
        full[at + "qkv.weight"] = torch.cat([plain[at + f"{name}.weight"] for name in ("q", "k", "v")])
        full[at + "gate_up.layer_norm_weight"] = plain[at + "norm2.weight"]
        full[at + "gate_up.weight"] = torch.cat([plain[at + "gate.weight"], plain[at + "up.weight"]])
        full[at + "out.weight"], full[at + "down.weight"] = plain[at + "out.weight"], plain[at + "down.weight"]
    return full


def loss_and_grads(tp, state):
    model = by_hand.Decoder(tp)
    tpi.load_full_state_dict(model, state)
    tokens, targets = by_hand.batch(0, "cpu")
    loss = tpi.vocab_parallel_cross_entropy(model(tokens), targets, tp_group=tp)
    loss.backward()
    return loss.detach(), tpi.testing.full_grads(model)


def test_the_values_are_those_of_plain_torch():
    torch.manual_seed(0)
    plain = PlainDecoder()
    for tensor in plain.parameters():
        nn.init.uniform_(tensor, -0.2, 0.2)  # also the norms', which would all be one
    state = from_plain(plain.state_dict())
    plain = plain.double()
    tokens, targets = by_hand.batch(0, "cpu")
    loss = F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    expected = from_plain({name: parameter.grad for name, parameter in plain.named_parameters()})
    with tpi.set_tp_invariant_mode(True):
        ranks = tpi.testing.run_ranks(loss_and_grads, 2, state, device="cpu")
    for found_loss, grads in ranks:
        torch.testing.assert_close(found_loss.double(), loss, rtol=1e-5, atol=0)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert (grad - expected[name]).norm() < 1e-4 * expected[name].norm(), name
