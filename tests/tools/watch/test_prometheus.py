"""The endpoint shows the newest training record, and no evaluation in its place."""

import json
import socket
import urllib.request

from weft.tools.watch.prometheus import Exporter


def test_records_of_evaluations_do_not_replace_those_of_training(tmp_path):
    records = [
        {"step": 4, "kind": "train", "loss": 2.0},
        {"step": 2, "kind": "checkpoint", "loss": 9.0, "sums/acc": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Exporter(tmp_path, port).update({0: (4, 0.5)})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    assert "weft_loss 2.0" in text and 'weft_rank_step_seconds{rank="0"} 0.5' in text
