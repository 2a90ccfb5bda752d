"""Workers that compute likelihoods with plain transformers and prove that they have the key, and faults of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import nan
from typing import Any

import torch
from torch import nn

from weft.inference.worker.proofs import HEADER, answer_proof, nonce_of

KEY = "secret"
Fault = Callable[[BaseHTTPRequestHandler, list[Any]], bytes]


@contextmanager
def worker(model: nn.Module, fault: str = "") -> Iterator[tuple[str, list[int]]]:
    """Yield the URL of a worker, and a list of the lengths of the prompts that it was sent.

    Args:
        fault: ``nan``, ``huge``, ``other key``, ``other prompt``, ``no proof``, ``killed`` or ``stopped``.
    """
    lengths: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["content-length"]))
            ids = json.loads(request)["prompt"]
            lengths.append(len(ids))
            nonce = nonce_of(KEY.encode(), self.headers["authorization"].partition(" ")[2].encode())
            assert nonce is not None and KEY not in str(self.headers)
            if fault == "stopped":
                time.sleep(60)
            if fault in ("killed", "stopped"):
                self.connection.close()
                return
            asked = [*ids[:-1], 1] if fault == "other prompt" else ids
            body = json.dumps({"choices": [{"prompt_logprobs": self.likelihoods(asked)}]}).encode()
            key = b"other" if fault == "other key" else KEY.encode()
            sent = json.dumps({"prompt": asked}).encode() if fault == "other prompt" else request
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            if fault != "no proof":
                self.send_header(HEADER, answer_proof(key, nonce, sent, body))
            self.end_headers()
            self.wfile.write(body)

        def likelihoods(self, ids: list[int]) -> list[Any]:
            with torch.no_grad():
                logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            of = {"nan": lambda _: nan, "huge": lambda _: 1e30}.get(fault, float)
            return [None, *({str(i): {"logprob": of(logs[n, i]), "rank": 1}} for n, i in enumerate(ids[1:]))]

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", lengths
    server.shutdown()
    server.server_close()
