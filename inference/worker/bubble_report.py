"""A worker's report of its bubbles and costs. A controller on another host reads it instead of the worker's boards.

`GET /weft/bubbles?horizon_s=SECONDS` needs a proof of the worker's key, and its answer has one as well. Times are
seconds from the answer on, because clocks of hosts differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from urllib.parse import parse_qs

from weft.inference.board.common_bubbles import stage_bubbles
from weft.inference.placement.prefill_cost import PrefillCost
from weft.inference.requests import Refusal
from weft.inference.worker.command import stage_file
from weft.inference.worker.settings import WorkerSettings

ROUTE = "/weft/bubbles"
MOST_HORIZON_S = 3600.0


class BubbleReport:
    """The reports of one worker."""

    def __init__(self, settings: str) -> None:
        """Read the boards and cost models that ``settings`` names."""
        self._settings = WorkerSettings.of(json.loads(settings))
        self._stages = stage_bubbles(self._settings.boards, self._settings.stages)

    def answer(self, query: bytes) -> bytes:
        """Return a report. Raise Refusal if ``query`` has no valid horizon."""
        text = parse_qs(query.decode("latin-1")).get("horizon_s", [""])[-1]
        try:
            horizon_s = float(text)
        except ValueError:
            horizon_s = 0.0
        if not 0.0 < horizon_s <= MOST_HORIZON_S:
            raise Refusal(400, f"horizon_s={text:.40}: give seconds above 0, at most {MOST_HORIZON_S:g}")
        now_s = monotonic()
        stages = [bubbles.upcoming(horizon_s) for bubbles in self._stages]
        spans = [
            None if found is None else [[round(at_s - now_s, 6) for at_s in span] for span in found] for found in stages
        ]
        return json.dumps({"stages": spans, "costs": self._costs()}).encode()

    def _costs(self) -> list[dict]:
        settings = self._settings
        files = [stage_file(Path(settings.cost_file), stage) for stage in range(settings.stages)]
        return [PrefillCost.load(file, quantile=settings.quantile).to_dict() for file in files]
