"""A prefill worker's settings, passed as JSON in vLLM's `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

SECTION = "weft"
VLLM_VERSION = "0.32.0"
"""The version whose private interfaces the plug-ins use (`vllm_interfaces`); its corrections are accepted as well."""
SETTINGS_VARIABLE = "WEFT_WORKER_SETTINGS"
"""Environment variable of the process that answers requests, with the same JSON."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of one prefill worker."""

    boards: tuple[str, ...]
    """Bubble boards of the ranks whose devices it shares, stage after stage."""
    guard_s: float
    """Seconds kept free before training is predicted to continue."""
    quantile: float
    """Share of steps that should finish within the prediction."""
    cost_file: str
    """Path of the cost model, kept between runs."""
    stages: int = 1
    """Number of pipeline stages."""
    allow_decode: bool = False
    """True if it also decodes."""
    outlives_training: bool = False
    """True if it computes what is left as fast as it can once training has ended."""
    status_file: str = ""
    """Path of the engine's `WorkerStatus`, for the process that answers `/health`, or empty for none."""
    trace_file: str = ""
    """Log of steps as JSON lines, or empty for none."""
    rings: str = ""
    """Folder of the training ranks' events, where `ChunkRecorder` records its steps, or empty for none."""
    ranks: tuple[int, ...] = ()
    """The ranks, in the order of `boards`."""
    remote: tuple[str, ...] = ()
    """HOST:PORT of each stage's process on another host, or empty for one on this host; () if all are here."""

    def to_additional_config(self) -> dict[str, Any]:
        """Return the value of `--additional-config`."""
        return {SECTION: asdict(self)}

    @classmethod
    def of(cls, additional_config: object) -> WorkerSettings:
        """Parse the settings from vLLM's additional config.

        Raises:
            ValueError: the section is missing, or has unknown fields.
        """
        section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
        if not isinstance(section, Mapping):
            raise ValueError('additional_config: no "weft" section; start the worker with `weft serve`')
        known = {field.name for field in fields(cls)}
        if unknown := set(section) - known:
            raise ValueError(
                f"additional_config.weft: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
            )
        try:
            return cls(**{**section, **{name: tuple(section.get(name, ())) for name in ("boards", "ranks", "remote")}})
        except TypeError as error:
            raise ValueError(f"additional_config.weft: {error}") from error
