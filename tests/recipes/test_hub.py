"""Pushing an export, against a hub of our own that speaks the client's protocol."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import HfApi, constants

from weft.conf.schema import WeftConfig
from weft.recipes.finish import push
from weft.tools.preflight import check_hub


class Hub(ThreadingHTTPServer):
    """Takes small files inside the commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.private, self.token = {}, None, None


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer({"error": "not here"}, 404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.token = self.headers.get("Authorization")
        if self.server.token != "Bearer hf_right":
            self.answer({"error": "who are you"}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            self.server.private = asked.get("private", asked.get("visibility") == "private")
            self.answer({"id": "me/mine", "url": f"http://{self.headers['Host']}/me/mine"})
        elif self.path.endswith("/preupload/main"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(
                {
                    "commitOid": "a" * 40,
                    "commitUrl": f"http://{self.headers['Host']}/me/mine/commit/a",
                    "pullRequestUrl": None,
                }
            )
        else:
            self.answer({}, 200)

    def answer(self, value, code=200):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi(endpoint=address, token=server.given))
    server.given = "hf_right"
    yield server
    server.shutdown()
    server.server_close()


def export(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


def test_an_export_is_pushed(hub, tmp_path):
    address = push(export(tmp_path), "me/mine", private=True)
    assert hub.files == {"config.json": b"{}", "model.safetensors": bytes(range(256))}
    assert hub.private is True and address.endswith("/me/mine/commit/a")


def test_a_refusal_says_how_to_go_on(hub, tmp_path):
    hub.given = "hf_wrong"
    with pytest.raises(
        ValueError, match=r"train\.hub_model_id=me/mine: .*401.*; the export is complete, .*hf upload me/mine"
    ):
        push(export(tmp_path), "me/mine", private=False)
    assert not hub.files


def test_what_cannot_be_pushed_is_known_before_the_run(monkeypatch):
    config = WeftConfig()
    check_hub(config)
    config.train.hub_model_id = "me/mine"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"hub_model_id=me/mine: HF_HUB_OFFLINE forbids"):
        check_hub(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="there is no token to push with; run `hf auth login`"):
        check_hub(config)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    check_hub(config)
