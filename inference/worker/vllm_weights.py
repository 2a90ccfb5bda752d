"""The route of a worker that replaces its model's weights while it serves."""

from __future__ import annotations

from asyncio import Lock
from pathlib import Path
from typing import Any

from weft.inference.requests import Refusal

ROUTE = "/weft/weights"
FOLDER_VARIABLE = "WEFT_WEIGHTS"
"""Environment variable with the folder of the weights that a worker starts with. Others lie next to it. Without the
variable a worker's weights cannot be replaced."""


class Weights:
    """The weights of a worker's engine."""

    def __init__(self, first: str) -> None:
        self._folder = Path(first).parent
        self._loading = Lock()
        self.name = Path(first).name
        """Name of the folder that the weights are from, or an empty string after an attempt that has failed."""

    async def load(self, engine: Any, name: object) -> None:
        """Load the weights in the folder ``name`` next to the first. Prompts that are being computed begin again.

        Raises:
            Refusal: there is no such folder, or the engine could not load the weights.
        """
        known = {path.name for path in self._folder.iterdir() if path.is_dir()}
        if not isinstance(name, str) or name not in known:
            raise Refusal(400, f"name={name!r:.80}: no folder of weights in {self._folder}; name one", field="name")
        async with self._loading:
            self.name = ""
            try:
                await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder / name)})
                # Without this argument vLLM keeps all of the old weights' cache while a prompt is being computed.
                await engine.reset_prefix_cache(reset_running_requests=True)
            except Exception as error:  # of the engine's: the weights may be partly loaded
                raise Refusal(500, f"{name}: not loaded ({error}); load again, or restart the worker") from error
            self.name = name
