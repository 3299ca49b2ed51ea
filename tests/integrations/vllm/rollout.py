"""A program that samples with vLLM: `rollout.py RUNS`, a JSON file of a list of runs, whose results it prints as JSON.

    {"model": .., "degree": 2, "dtype": "float32", "prompts": [[..], ..], "others": [..], "sampling": {..}}

others: folders of weights that are sent to the running engine, one after the other; each is sampled from. A run's
result is the texts and log-probabilities of each folder, or the text of an error. Its engines run in this process, one
after the other, because each process spends seconds to import vLLM. It is a program because vLLM's workers import the
main one, and because layers that are registered stay so.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def result_of(given: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams

    import tp_invariant.integrations.vllm as tpi_vllm

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
    llm.llm_engine.engine_core.shutdown()
    return results


def main() -> None:
    results: list[Any] = []
    for given in json.loads(Path(sys.argv[1]).read_text()):
        environment = given.get("environment", {})
        os.environ.update(environment)
        try:
            results.append(result_of(given))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
        for name in environment:
            del os.environ[name]
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
