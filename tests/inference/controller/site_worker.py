"""A server of a site without vLLM: a prefill worker with its rank's board and Weft's middleware, or a decode server."""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI

from weft.inference.board.writer import BoardWriter
from weft.inference.worker.settings import SETTINGS_VARIABLE, WorkerSettings
from weft.inference.worker.vllm_middleware import KeyMiddleware, PrefillOnlyMiddleware


def train(path: Path) -> None:
    """Step for ever: a bubble of 80 ms in 100 ms."""
    writer = BoardWriter(path, rank=0, plan=[], max_edges=16)
    while True:
        writer.begin(1)
        time.sleep(0.08)
        writer.busy()
        time.sleep(0.02)


def main(port: int, computing_s: float, folder: str) -> None:
    """Serve until killed: prompts in their order. Without a folder, serve as a decode server."""
    if folder:
        board = Path(folder) / "rank0.board"
        threading.Thread(target=train, args=(board,), daemon=True).start()
        settings = WorkerSettings(boards=(str(board),), guard_s=0.002, quantile=0.98, cost_file=f"{folder}/cost.json")
        os.environ[SETTINGS_VARIABLE] = json.dumps(settings.to_additional_config())
    app, computing = FastAPI(), asyncio.Lock()
    running: list[int] = []
    most = {"running": 0}
    app.state.server = SimpleNamespace(should_exit=False)
    app.state.engine_client = SimpleNamespace(is_paused=lambda: asyncio.sleep(0))

    @app.get("/health")
    async def health() -> None:
        pass

    @app.get("/metrics")
    async def metrics() -> dict:
        """Return how many prompts were here at once since the last call."""
        before = dict(most)
        most["running"] = len(running)
        return before

    @app.post("/v1/completions")
    async def complete() -> dict:
        most["running"] = max(most["running"], len(running) + 1)
        running.append(1)
        async with computing:
            await asyncio.sleep(computing_s)
        running.pop()
        return {"kv_transfer_params": {"do_remote_prefill": True}, "choices": [{"finish_reason": "length"}]}

    app.add_middleware(PrefillOnlyMiddleware if folder else KeyMiddleware)
    uvicorn.run(app, host="0.0.0.0", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
