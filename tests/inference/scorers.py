"""Workers that compute likelihoods with plain transformers and prove that they have the key, and faults of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import nan
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.inference.worker.proofs import HEADER, answer_proof, nonce_of
from weft.inference.worker.score_arrays import ROUTE, SPARE, as_array

KEY = "secret"
SLOW_S = 0.5
"""Seconds by which a slow worker answers later."""


def likelihoods(model: nn.Module, value: dict[str, Any], fault: str = "") -> np.ndarray:
    """Return the answer to a request, by the logits of transformers."""
    ids, top_k = torch.tensor(value["prompt"]), value["top_k"]
    with torch.no_grad():
        logs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    own = ids[1:, None]
    found = logs.topk(min(top_k + SPARE, logs.shape[-1])) if top_k else (logs.gather(-1, own), own)
    candidates = torch.stack([found[1].double(), found[0].double()], -1).numpy()
    candidates[..., 1] = {"nan": nan, "huge": 1e30}.get(fault, candidates[..., 1])
    return as_array(candidates, top_k, value["words"])


@contextmanager
def worker(model: nn.Module, fault: str = "") -> Iterator[tuple[str, list[int]]]:
    """Yield the URL of a worker, and a list of the lengths of the prompts that it was sent.

    Args:
        fault: ``nan``, ``huge``, ``other key``, ``other prompt``, ``no proof``, ``slow``, ``killed`` or ``stopped``.
    """
    lengths: list[int] = []
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["content-length"]))
            value = json.loads(request)
            lengths.append(len(value["prompt"]))
            nonce = nonce_of(KEY.encode(), self.headers["authorization"].partition(" ")[2].encode())
            assert self.path == ROUTE and nonce is not None and KEY not in str(self.headers)
            ended.wait({"stopped": 60.0, "slow": SLOW_S}.get(fault, 0.0))
            if fault in ("killed", "stopped"):
                self.connection.close()
                return
            if fault == "other prompt":
                value["prompt"][-1] = 1
            body = likelihoods(model, value, fault).tobytes()
            key = b"other" if fault == "other key" else KEY.encode()
            sent = json.dumps(value).encode() if fault == "other prompt" else request
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            if fault != "no proof":
                self.send_header(HEADER, answer_proof(key, nonce, sent, body))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", lengths
    ended.set()
    server.shutdown()
    server.server_close()
