"""A program that samples with vLLM and prints each text and its log-probabilities as JSON: arguments as JSON.

    {"model": .., "degree": 2, "dtype": "float32", "prompts": [[..], ..], "others": [..], "sampling": {..}, "out": ..}

others: folders of weights that are sent to the running engine, one after the other; each is sampled from. It is a
program because vLLM's workers are processes that import the main one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    from vllm import LLM, SamplingParams

    import tp_invariant.integrations.vllm as tpi_vllm

    given = json.loads(sys.argv[1])
    stock, degree = given.get("stock", False), given["degree"]
    options: dict[str, Any] = dict(
        tensor_parallel_size=degree, dtype=given["dtype"], skip_tokenizer_init=True, max_model_len=512, max_num_seqs=4,
        max_num_batched_tokens=64, distributed_executor_backend="mp" if degree > 1 else "uni", seed=0,
    )  # fmt: skip
    options |= given.get("engine", {})
    if stock:
        llm = LLM(given["model"], enforce_eager=True, logprobs_mode="processed_logprobs", **options)
    else:
        llm = LLM(given["model"], **tpi_vllm.engine_arguments(**options))
        tpi_vllm.assert_active(llm)
    common = dict(max_tokens=given.get("tokens", 8), detokenize=False, ignore_eos=True)
    if stock:
        params = [SamplingParams(temperature=0.0, logprobs=0, **common)] * len(given["prompts"])
    else:
        sampling = given["sampling"]
        params = [tpi_vllm.sampling_params(request=i, **sampling, **common) for i in range(len(given["prompts"]))]

    def sample() -> list[tuple[list[int], list[float]]]:
        texts = []
        for out in llm.generate([{"prompt_token_ids": p} for p in given["prompts"]], params, use_tqdm=False):
            ids = [int(i) for i in out.outputs[0].token_ids]
            texts.append((ids, [p[i].logprob for i, p in zip(ids, out.outputs[0].logprobs, strict=True)]))
        return texts

    results = [sample()]
    for folder in given.get("others", []):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        llm.reset_prefix_cache()
        results.append(sample())
    with open(given["out"], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
