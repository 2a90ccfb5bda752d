"""vLLM's worker for one pipeline stage of a prefill worker, with a gate of its own.

`--worker-cls weft.inference.worker.vllm_stage.StageWorker`, with the mp executor. Hidden states are handed over in host
memory: a stage waits for them there, then for its rank's bubble. NCCL would let the sender's or the receiver's GPU spin
until the other rank has a bubble, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from weft.inference.board.reader import BoardReader
from weft.inference.worker.gate import Span
from weft.inference.worker.settings import WorkerSettings
from weft.inference.worker.stage_gate import StageGate
from weft.inference.worker.status import record_stage
from weft.inference.worker.vllm_interfaces import PREDICTED, SPANS, make_readers_block

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

    from weft.inference.worker.vllm_cpu import keep_base_prompts, keep_generators
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = init_logger(f"vllm.{__name__}")


class StageWorker(PlatformWorker):
    """A stage that computes in its rank's bubbles."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Create the worker with the settings in `--additional-config`. See `WorkerSettings`."""
        super().__init__(vllm_config, *args, **kwargs)
        settings = WorkerSettings.of(vllm_config.additional_config)
        if settings.status_file:
            record_stage(Path(settings.status_file), self.rank)
        self._gate = StageGate(BoardReader(settings.boards[self.rank]), guard_s=settings.guard_s)
        self._predicted_s: Sequence[float] | None = None
        self._begun_s = self._begun_cpu_s = 0.0
        self._spans: list[Span] = []
        self._weight_bytes = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the stage's layers, and put the gate before their computations."""
        process = base_loader.process_weights_after_loading

        def counted(model: torch.nn.Module, *rest: Any) -> None:
            self._weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
            process(model, *rest)  # on a CPU it packs them, and they are no parameters any more

        base_loader.process_weights_after_loading = counted
        super().load_model(*args, **kwargs)
        runner, group = self.model_runner, get_pp_group()
        # vLLM allocates them in its profiling run, which it leaves out on a CPU in eager mode.
        if not group.is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        # The communicator of CPUs spins in receives, and takes tensors only.
        group.use_cpu_custom_send_recv = False
        execute = runner.execute_model

        def execute_in_bubble(scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
            if intermediate_tensors is not None:
                self._spans = intermediate_tensors.tensors.pop(SPANS)  # waits for the hidden states
                self._begin()
            output = execute(scheduler_output, intermediate_tensors)
            if isinstance(output, IntermediateTensors):
                copies = {name: tensor.to("cpu", copy=True) for name, tensor in output.tensors.items()}
                output.tensors = copies | {SPANS: [*self._spans, self._ended()]}
            return output

        runner.execute_model = execute_in_bubble

    def compile_or_warm_up_model(self) -> Any:
        """Log the stage's memory, when its KV cache has been allocated. See the base class."""
        cache = sum({tensor.data_ptr(): tensor.nbytes for tensor in self.model_runner.kv_caches}.values())
        stage, stages = get_pp_group().rank_in_group, get_pp_group().world_size
        logger.info(
            "stage %d of %d: %d bytes of weights, %d bytes of KV cache", stage, stages, self._weight_bytes, cache
        )
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute the stage's part of a step in a bubble. See the base class."""
        self._predicted_s, self._spans = getattr(scheduler_output, PREDICTED, None), []
        if scheduler_output.total_num_scheduled_tokens and get_pp_group().is_first_rank:
            self._begin()
        output = super().execute_model(scheduler_output)
        self._pp_send_work: list[Any] = []  # sends have copies of their own, and last until the next stage is ready
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as vLLM does. The last stage reports how long each stage has taken."""
        output = super().sample_tokens(grammar_output)
        if self._spans and get_pp_group().is_last_rank:
            setattr(output, SPANS, [*self._spans, self._ended()])
        return output

    def _begin(self) -> None:
        if self._predicted_s is not None:
            self._gate.wait(self._predicted_s[get_pp_group().rank_in_group])
        self._begun_s, self._begun_cpu_s = time.monotonic(), time.thread_time()

    def _ended(self) -> Span:
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()
        # The thread that computes on a CPU is this one, and its time excludes when it was preempted.
        computed_s = time.thread_time() - self._begun_cpu_s if current_platform.is_cpu() else None
        return self._begun_s, time.monotonic(), computed_s


make_readers_block()
if current_platform.is_cpu():
    keep_generators(CPUModelRunner)
    keep_base_prompts()
