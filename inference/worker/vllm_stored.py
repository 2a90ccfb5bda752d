"""vLLM's worker that loads weights from a run's checkpoints: `--worker-cls` and `--load-format` of evaluations.

vLLM's own `weight_transfer` sends weights from a process that holds the whole model, which no rank of a pipeline does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from weft.inference.worker.stored_weights import stored_weights

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


@register_model_loader("weft")
class StoredLoader(DefaultModelLoader):
    """Loads the weights of a folder of `stored_weights`, at the start and when they are replaced."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing, because the folder is local."""

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights by name."""
        self.counter_before_loading_weights = time.perf_counter()
        yield from stored_weights(Path(model_config.model))


class StoredWorker(PlatformWorker):
    """vLLM's worker. The module of this class registers the loader in the process that needs it."""
