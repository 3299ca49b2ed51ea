"""vLLM whose log-probabilities have the bits of the trainer's, at every tensor-parallel degree, batch and schedule.

    TP_INVARIANT_MODE=1 python rollout.py        # the variable: vLLM's workers are other processes

    import tp_invariant.integrations.vllm as tpi_vllm
    llm = LLM("Qwen/Qwen3-0.6B", **tpi_vllm.engine_arguments(tensor_parallel_size=2))
    llm.generate(prompts, tpi_vllm.sampling_params(seed=7, request="step 3, prompt 5", max_tokens=64))

vLLM 0.32 on CPUs; other versions and platforms are refused by name. vLLM loads `register` in each of its processes (the
entry point `vllm.general_plugins`), which registers this package's layers in place of vLLM's if the mode is on. It only
logs a plugin that fails. But the arguments name a load format that this plugin alone has. Its loader looks at every
layer of the model: without the plugin, or with a layer that is not this package's, the engine does not start.

Files, each of which imports those above it (all but this one import vLLM):

    layers.py       linear layers, embedding, output layer, norms, activations and the rotary embedding
    experts.py      mixtures of experts: their routers, weights and products
    gpt_oss.py      how gpt_oss reads its weights
    attention.py    the attention backend, which reads keys and values through vLLM's block table
    checks.py       what of a configuration, and which layers of a model, would break the contract: all faults at once
    loader.py       the load format
    sampler.py      the keyed draws, as one of vLLM's logits processors
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.mode import is_tp_invariant_mode_enabled

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

SUPPORTED = ("0.32.",)  # what versions begin with
LOAD_FORMAT = "tp_invariant"
_HERE = "tp_invariant.integrations.vllm"

__all__ = ["Answers", "assert_active", "engine_arguments", "register", "sampling_params"]


def register() -> None:
    """vLLM's entry point: registers the load format, and with the mode on this package's layers, once in each process.

    Raises:
        RuntimeError: with the mode on, a version or platform that is not supported. vLLM logs it, and then knows no
            such load format.
    """
    from . import loader  # imports vLLM

    if is_tp_invariant_mode_enabled():
        loader.check_version()
        from . import attention, experts, layers

        layers.register()
        experts.register()
        attention.register()
    loader.register()


def engine_arguments(*, load_format: str = "auto", **others: Any) -> dict[str, Any]:
    """Arguments for vLLM's LLM or AsyncEngineArgs, besides the model and tensor_parallel_size.

    Args:
        load_format: vLLM's own by which weights are read; "dummy" for weights that are sent later.
        others: further arguments of vLLM's; those that this function sets cannot be given.

    Raises:
        RuntimeError: the mode is off.
        ValueError: an argument that this function sets.
    """
    if not is_tp_invariant_mode_enabled():
        raise RuntimeError("the mode is off: set TP_INVARIANT_MODE=1 in the environment, which vLLM's workers inherit")
    own: dict[str, Any] = {
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": {"load_format": load_format},
        "worker_extension_cls": f"{_HERE}.Answers",
        "logits_processors": [f"{_HERE}.sampler:KeyedSampler"],
        "logprobs_mode": "processed_logits",
        "enforce_eager": True,
    }
    if twice := sorted(own.keys() & others.keys()):
        raise ValueError(f"engine_arguments sets {', '.join(twice)}: leave them out")
    return own | others


def sampling_params(
    *,
    seed: int,
    request: str | int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    **others: Any,
) -> SamplingParams:
    """vLLM's SamplingParams of one request whose draws are those of `tpi.sampling.Draws`; it returns log-probabilities.

    The log-probability of a drawn token has the bits of `tpi.token_log_probs` with this temperature, over the whole
    vocabulary or, where top_k, top_p or min_p is given, over the ids that could be drawn.

    Args:
        seed, request: what the draws depend on besides the position and the logits. Two requests with one prompt need
            two names, or they are the same text.
        temperature: 0 is greedy, whose log-probabilities are those of temperature 1.
        top_k, top_p, min_p: as of `tpi.sampling.Draws`.
        others: further arguments of vLLM's (max_tokens, stop, ..).

    Raises:
        ValueError: an option out of range, or one of vLLM's that is not supported (n above 1, penalties,
            prompt_logprobs).
    """
    from vllm import SamplingParams

    from .sampler import KEY, check

    options = dict(seed=seed, request=request, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    params = SamplingParams(temperature=0.0, logprobs=0, extra_args={KEY: options}, **others)
    check(params)
    return params


def assert_active(llm: LLM) -> None:
    """Asks every rank of an engine whether its model consists of this package's layers.

    Raises:
        RuntimeError: a rank that has none, or no such answer, or another model than the loader has looked at.
    """
    try:
        answers = llm.collective_rpc("tp_invariant_answer")
    except Exception as error:
        raise RuntimeError(
            "this engine's workers do not answer: start it with TP_INVARIANT_MODE=1 and **engine_arguments()"
        ) from error
    wrong = {rank: answer for rank, answer in enumerate(answers) if answer != "active"}
    if wrong:
        raise RuntimeError("; ".join(f"rank {rank}: {answer}" for rank, answer in wrong.items()))


class Answers:
    """What vLLM's workers answer (their `worker_extension_cls`)."""

    def tp_invariant_answer(self) -> str:
        from .checks import faults_of_model

        if not is_tp_invariant_mode_enabled():
            return "the mode is off: set TP_INVARIANT_MODE=1 in the environment"
        faults = faults_of_model(self.get_model())  # type: ignore[attr-defined]
        return "active" if not faults else "; ".join(faults)
