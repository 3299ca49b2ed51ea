"""Pretrains a small GPT by Megatron's own training loop; its last line is a digest, the same at every degree.

    python examples/pretrain_megatron.py --steps 3
    torchrun --nproc-per-node 2 examples/pretrain_megatron.py --steps 3                       (TP=2: the same digest)
    torchrun --nproc-per-node 4 examples/pretrain_megatron.py --steps 3 --sequence-parallel   (TP=4: the same digest)
    torchrun --nproc-per-node 2 examples/pretrain_megatron.py --steps 3 --off                 (the control: another one)

The loop is megatron.training.pretrain, which the package megatron-core has from version 0.19 on. The model reads this
library's text (words.py) as bytes. With GPUs it runs on them over NCCL, --device cpu or a machine without them: on CPUs
over gloo, where this program answers what Megatron asks of torch.cuda. Other arguments are Megatron's, such as --bf16,
--num-layers 4, --untie-embeddings-and-output-weights or --qk-layernorm; compare runs with the same ones. --hybrid
trains Megatron's HybridModel in place of its GPTModel.

Read `main` for what a program like Megatron's pretrain_gpt.py needs: install() before pretrain().
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tp_invariant as tpi
from tp_invariant.examples.words import TEXT
from tp_invariant.testing import digest

SEQUENCE = 64  # tokens

_MODEL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --vocab-size 256 --make-vocab-size-divisible-by 128 --tokenizer-type NullTokenizer --transformer-impl local
"""
_TRAINING = f"""
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size 2 --global-batch-size 4 --lr 1e-2
    --lr-decay-style constant --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
    --eval-interval 1000 --log-interval 1 --no-save-optim --no-save-rng --dataloader-type single --num-workers 0
"""
# those kernels of Megatron that need Apex, Transformer Engine or a GPU
_PLAIN_KERNELS = """
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion
"""


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of the text's bytes: {"tokens", "labels"}, int64 [SEQUENCE] each; it begins again where it ends."""

    def __init__(self, sequences: int) -> None:
        self.sequences, self.ids = sequences, torch.tensor(list(TEXT.encode()))

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * SEQUENCE % (len(self.ids) - SEQUENCE)
        return {
            "tokens": self.ids[start : start + SEQUENCE],
            "labels": self.ids[start + 1 : start + SEQUENCE + 1],
        }


def datasets(samples: Sequence[int]) -> tuple[Text, None, None]:
    """Megatron's question for the training, validation and test data, each of so many sequences."""
    return Text(samples[0]), None, None


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank reads the text by itself


def forward_step(batches: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Megatron's question for the loss of each token of the next batch, and how to add these up."""
    batch = {name: part.to(next(model.parameters()).device) for name, part in next(batches).items()}
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=batch["labels"]), total


def total(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of the tokens' losses, number of tokens, what Megatron logs)."""
    loss, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


# --- the digest ------------------------------------------------------------------------------------------------------


class Record:
    """The loss and the gradient norm of each step, and the model, taken from Megatron's train_step as it returns."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.models: list[nn.Module] = []

    def of(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(forward: Any, data: Any, model: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
            result = train_step(forward, data, model, *args, **kwargs)
            step = len(self.values) // 2
            self.values[f"loss {step}"], self.values[f"norm {step}"] = result[0]["lm loss"].clone(), float(result[5])
            self.models = model
            return result

        return recorded

    def digest(self) -> str:
        """Of all losses, norms and whole parameters; every rank must call it.

        Raises:
            RuntimeError: ranks have other digests than this one.
        """
        parameters = {name: whole(p) for model in self.models for name, p in model.named_parameters()}
        text = " ".join(digest(value) for value in [*self.values.values(), *parameters.values()])
        mine = digest(torch.tensor(list(text.encode())))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        if set(every) != {mine}:
            raise RuntimeError(f"ranks have different digests: {every}")
        return mine


def whole(p: nn.Parameter) -> Tensor:
    """The parameter of which this rank has a part. A gated layer has two matrices, of which each rank has its rows."""
    part = p.detach().contiguous()
    if not getattr(p, "tensor_model_parallel", False):
        return part
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    pieces = [each.chunk(p.partition_stride, p.partition_dim) for each in parts]  # type: ignore[attr-defined]
    return torch.cat([each[i] for i in range(len(pieces[0])) for each in pieces], p.partition_dim)  # type: ignore[attr-defined]


# --- CPUs ------------------------------------------------------------------------------------------------------------


class _CpuForCuda(TorchFunctionMode):
    """Tensors that are to be on a GPU are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # Megatron wants one of torch.cuda's types
            return f"torch.cuda.{func(*args).rpartition('.')[2]}"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """What Megatron asks of torch.cuda is answered for the CPU while this context lasts."""
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.training import training

    stream = mock.MagicMock(name="stream")
    answers = dict(
        device_count=lambda: 1, set_device=lambda _: None, current_device=lambda: torch.device("cpu"),
        synchronize=lambda *_: None, manual_seed=torch.manual_seed,
        get_device_properties=lambda *_: mock.Mock(major=10),
        current_stream=lambda *_: stream, Stream=lambda *_, **__: stream,
        stream=lambda _: contextlib.nullcontext(),
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        empty_cache=lambda: None, FloatTensor=torch.FloatTensor, HalfTensor=torch.HalfTensor,
        BFloat16Tensor=torch.BFloat16Tensor, memory_allocated=lambda *_: 0, max_memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0, max_memory_reserved=lambda *_: 0, memory_stats=lambda *_: {},
        device_memory_used=lambda *_: 0,
    )  # fmt: skip
    initialize = training.initialize_megatron
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name in ("get_rng_state", "set_rng_state"):
            theirs = "_" + name.replace("_rng", "_cuda_rng")
            stack.enter_context(mock.patch.object(megatron_random, theirs, answers[name]))
        for name, answer in dict(
            initialize_megatron=lambda **options: initialize(allow_no_cuda=True, **options),
            set_jit_fusion_options=lambda **_: None,  # compiles kernels ahead, on a GPU
        ).items():
            stack.enter_context(mock.patch.object(training, name, answer))
        stack.enter_context(mock.patch.object(nn.Module, "cuda", lambda module, *_: module))
        stack.enter_context(_CpuForCuda())
        yield


# --- the program -----------------------------------------------------------------------------------------------------


def check_megatron() -> None:
    """Raises: SystemExit: no megatron.training is installed; it says which version has it."""
    try:
        from megatron.core import __version__
    except ImportError:
        __version__ = "no version"
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        raise SystemExit(
            f"pretrain_megatron.py needs megatron.training, which megatron-core has from 0.19 on ({__version__} is "
            "installed): pip install --no-deps megatron-core==0.19.2 in Python 3.12, or put a checkout of Megatron-LM "
            "into PYTHONPATH"
        )


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """This program's options, and the command line for Megatron."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=3, help="steps of the optimizer (3)")
    parser.add_argument("--tensor-model-parallel-size", type=int, help="the tensor-parallel degree (all ranks)")
    parser.add_argument("--sequence-parallel", action="store_true", help="without effect on one rank")
    parser.add_argument("--hybrid", action="store_true", help="HybridModel, of attention and MLP layers")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--off", action="store_true", help="the control: the mode is off; TP_INVARIANT_MODE=0 likewise")
    options, others = parser.parse_known_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    degree = options.tensor_model_parallel_size or int(os.environ.get("WORLD_SIZE", "1"))
    line = (_MODEL + _TRAINING + _PLAIN_KERNELS).split()
    line += f"--train-iters {options.steps} --tensor-model-parallel-size {degree}".split()
    line += ["--sequence-parallel"] if options.sequence_parallel and degree > 1 else []
    line += ["--hybrid-layer-pattern", "*-*-"] if options.hybrid else []
    line += ["--distributed-backend", "gloo" if options.device == "cpu" else "nccl"]
    line += ["--use-cpu-initialization"] if options.device == "cpu" else []
    return options, line + others


def main(argv: Sequence[str] | None = None) -> None:
    check_megatron()
    options, line = arguments(argv)
    # by itself one rank; port 0: one that is free
    for name, value in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=0).items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which Megatron wants with sequence parallelism

    import tp_invariant.integrations.megatron as tpi_megatron

    tpi_megatron.install()

    from megatron.core.enums import ModelType
    from megatron.training import arguments as megatron_arguments
    from megatron.training import training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )

    record = Record()
    off = options.off or os.environ.get("TP_INVARIANT_MODE") == "0"
    with (
        tpi.set_tp_invariant_mode(not off),
        mock.patch.object(sys, "argv", [sys.argv[0], *line]),
        mock.patch.object(training, "train_step", record.of(training.train_step)),
        # Megatron's data sets have an index in C++, which Text does not use and whose makefile a wheel lacks
        mock.patch("megatron.core.datasets.utils.compile_helpers"),
        on_cpus() if options.device == "cpu" else contextlib.nullcontext(),
    ):
        args = megatron_arguments.parse_and_validate_args()
        model = (hybrid_config_from_args if options.hybrid else gpt_config_from_args)(args)
        training.pretrain(
            pretrain_cfg_container_from_args(args, model), datasets, ModelType.encoder_or_decoder, forward_step
        )
        found = record.digest()
    if dist.get_rank() == 0:
        print("losses", *(f"{value:.9g}" for name, value in record.values.items() if name.startswith("loss")))
        print("norms", *(f"{value:.9g}" for name, value in record.values.items() if name.startswith("norm")))
        print("digest", found, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
