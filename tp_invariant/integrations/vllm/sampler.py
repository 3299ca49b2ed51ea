from vllm.v1.sample.logits_processor.interface import LogitsProcessor
import torch
from ...sampling.log_probs import log_softmax
KEY = "tp_invariant"
def check(p): pass
class KeyedSampler(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory): pass
    def is_argmax_invariant(self): return False
    def update_state(self, u): pass
    def apply(self, logits):
        ids = logits.argmax(-1, keepdim=True)
        lp = log_softmax(logits).gather(-1, ids)
        return torch.full_like(logits, float("-inf")).scatter_(-1, ids, lp)
