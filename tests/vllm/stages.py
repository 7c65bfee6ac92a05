"""vLLM's worker for CPUs as a stage of a pipeline. In 0.32 a stage after the first fails at its first step where
nothing is compiled (`enforce_eager`): the place for what the stage before sends is made in the warm-up, which is left
out then."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class Stage(CPUWorker):  # type: ignore[misc]
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        make = runner.model.make_empty_intermediate_tensors
        runner.intermediate_tensors = make(runner.max_num_tokens, runner.dtype, runner.device)
