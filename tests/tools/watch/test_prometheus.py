"""The endpoint shows the newest training record and supervision's events, and the dashboard all of them."""

import json
import re
import urllib.request
from pathlib import Path

from weft.conf.host.processes import free_port
from weft.tools.watch.prometheus import Exporter


def served(folder):
    port = free_port()
    links = {0: {"links": [{"peer": 3, "retransmissions": 7}, 5, {"peer": 4, "broken": "x"}]}}
    Exporter(folder, port).update({0: (4, 0.5)}, links)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return answer.read().decode()


def test_records_of_evaluations_do_not_replace_those_of_training(tmp_path):
    records = [
        {"step": 4, "kind": "train", "loss": 2.0},
        {"step": 2, "kind": "checkpoint", "loss": 9.0, "sums/acc": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = served(tmp_path)
    assert "weft_loss 2.0" in text and 'weft_rank_step_seconds{rank="0"} 0.5' in text


def test_the_dashboard_shows_every_metric_and_no_other(tmp_path):
    names = {
        *("step", "loss", "epoch", "lr", "grad_norm", "step_seconds", "tokens_per_second"),
        *("mfu", "bubble_share", "peak_memory_gb"),
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train", **dict.fromkeys(names, 1.0)}) + "\n")
    (tmp_path / "supervisor").mkdir()
    events = ("attempt", "alert", "fault", "attempt")
    journal = "".join(json.dumps({"event": event}) + "\n" for event in events)
    (tmp_path / "supervisor" / "journal.jsonl").write_text(journal + '["damaged"]\n{')
    text = served(tmp_path)
    assert 'weft_events{event="attempt"} 2.0' in text and 'weft_events{event="alert"} 1.0' in text
    assert "weft_restarts 1.0" in text
    assert 'weft_link{counter="retransmissions",peer="3",rank="0"} 7.0' in text
    dashboard = (Path(__file__).parents[3] / "docs" / "grafana" / "training.json").read_text()
    assert set(re.findall(r"weft_\w+", dashboard)) == set(re.findall(r"(?m)^weft_\w+", text))
