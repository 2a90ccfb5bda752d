"""What a prefill worker is told: one JSON value inside vLLM's own `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

SECTION = "weft"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One prefill worker."""

    boards: tuple[str, ...]
    """Bubble boards of the ranks whose devices it shares."""
    guard_s: float
    """Seconds kept free before training is expected back."""
    quantile: float
    """Share of its steps that are to end when predicted."""
    cost_file: str
    """Where the cost model is kept between runs."""
    allow_decode: bool = False
    """Whether it also decodes."""
    status_file: str = ""
    """Where the engine says that it lives, for the process that answers `/health`; empty is nowhere."""
    trace_file: str = ""
    """Where each step is noted, one JSON line; empty is nowhere."""

    def to_additional_config(self) -> dict[str, Any]:
        """The value of `--additional-config`."""
        return {SECTION: asdict(self)}

    @classmethod
    def of(cls, additional_config: object) -> WorkerSettings:
        """The settings in what vLLM was given.

        Raises:
            ValueError: there is no such section, or it names fields that do not exist.
        """
        section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
        if not isinstance(section, Mapping):
            raise ValueError('additional_config: no "weft" section; start the worker with `weft serve`')
        known = {field.name for field in fields(cls)}
        if unknown := set(section) - known:
            raise ValueError(
                f"additional_config.weft: unknown {', '.join(sorted(unknown))}; has {', '.join(sorted(known))}"
            )
        try:
            return cls(**{**section, "boards": tuple(section.get("boards", ()))})
        except TypeError as error:
            raise ValueError(f"additional_config.weft: {error}") from error
