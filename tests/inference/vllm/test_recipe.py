"""The lines of docs/serving.md, as they stand there: vLLM's own proxy and the openai client get what a stock server
answers, while training goes on."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WEFT = Path(os.environ.get("WEFT_BIN", ROOT / ".venv" / "bin")).absolute() / "weft"
PROXY = Path(os.environ.get("TOY_PROXY", ROOT / ".cache" / "toy_proxy_server.py")).absolute()
MISSING = [str(path) for path in (WEFT, PROXY) if not path.exists()]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: make test-vllm, with the network"),
]

WORDS = "a pipeline leaves each rank idle in gaps that are known in advance and a prompt can be computed there"
NUM_REQUESTS = 200
OUTPUT = 8
STARTING_S, ANSWERING_S = 500.0, 350.0
PORTS = {"8000": "18500", "8300": "18501", "8301": "18502", "8400": "18503", "5600": "15800", "5700": "15801"}
"""The document's ports, and those of this test."""


def lines_of_the_document(model: Path, folder: Path) -> str:
    """The recipe's shell lines, with folders and ports of this test's own."""
    text = (ROOT / "docs" / "serving.md").read_text()
    (script,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    own = {
        "$PWD/served": str(model),
        "$PWD/.venv-vllm/bin/python": sys.executable,
        "toy_proxy_server.py": str(PROXY),
        "weft ": f"{WEFT} ",
        # Answers that are to be compared are computed, not remembered.
        "--enforce-eager": "--enforce-eager --no-enable-prefix-caching",
        "recipe=serving": "recipe=serving inference.controller.port=8300 inference.prefill.first_port=8301 "
        "inference.prefill.first_side_port=5600 "
        # It is answers that are tested, also on a host that is busy with other things.
        f"inference.prefill.yield_cores=false inference.controller.deadline_s={ANSWERING_S} "
        f"inference.boards={folder}/boards "
        f"inference.prefill.cost_dir={folder} train.output_dir={folder}/runs",
    }
    for old, new in own.items():
        assert old in script, old
        script = script.replace(old, new)
    for old, new in PORTS.items():
        script = re.sub(rf"\b{old}\b", new, script)
    return script


def get(port: str, path: str) -> str:
    """The text of an answer; empty without one."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[port]}{path}", timeout=5) as answer:
            return answer.read().decode() or "ok"
    except (OSError, urllib.error.URLError):
        return ""


def prompts() -> list[str]:
    """Texts of 5 to 90 tokens, of which some begin alike."""
    draw = random.Random(11)
    words = WORDS.split()
    begin = " ".join(draw.choice(words) for _ in range(5))
    return [
        (begin if number % 4 == 0 else "") + " ".join(draw.choice(words) for _ in range(draw.randint(2, 10)))
        for number in range(NUM_REQUESTS)
    ]


async def complete(port: str, model: Path, texts: list[str]) -> tuple[list[tuple[int, ...]], int]:
    """The tokens that the openai client gets for all of them at once, without a second attempt; and the number of
    tokens of the prompts."""
    from openai import AsyncOpenAI

    url = f"http://127.0.0.1:{PORTS[port]}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWERING_S) as client:
        found = await asyncio.gather(
            *(
                client.completions.create(
                    model=str(model),
                    prompt=text,
                    max_tokens=OUTPUT,
                    temperature=0.0,
                    # Half of the vocabulary stands for no text.
                    extra_body={"return_token_ids": True},
                )
                for text in texts
            ),
            return_exceptions=True,
        )
    errors = [answer for answer in found if isinstance(answer, BaseException)]
    assert not errors, f"{len(errors)} of {len(texts)} failed, the first with {errors[0]!r}"
    return [tuple(answer.choices[0].token_ids) for answer in found], sum(answer.usage.prompt_tokens for answer in found)


def tokens_from(source: str) -> float:
    """Prompt tokens of the decoding server by where their cache came from."""
    lines = [line for line in get("8400", "/metrics").splitlines() if "prompt_tokens_by_source" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'"{source}"' in line and "_total" in line)


def test_two_hundred_at_once_through_vllms_proxy_equal_a_stock_server(model, tmp_path):
    env = dict(os.environ, PYTHONPATH="", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu")
    env.pop("PYTHONPATH")
    log = tmp_path / "log"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", lines_of_the_document(model, tmp_path)],
            cwd=tmp_path,
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + STARTING_S
        waited = {"8400": "/health", "8300": "/ready", "8000": "/healthcheck"}
        while time.monotonic() < deadline and shell.poll() is None and waited:
            waited = {port: path for port, path in waited.items() if not get(port, path)}
            time.sleep(1.0)
        assert not waited, f"{waited}: no answer\n{log.read_text()[-6000:]}"
        texts = prompts()
        answers, asked = asyncio.run(complete("8000", model, texts))
        fetched, computed = tokens_from("external_kv_transfer"), tokens_from("local_compute")
        stock, _ = asyncio.run(complete("8400", model, texts))
        late = [line for line in get("8300", "/metrics").splitlines() if "lateness_seconds_count" in line]
    finally:
        os.killpg(shell.pid, signal.SIGTERM)  # `weft serve` ends its workers, which are sessions of their own
        end(shell)
    assert len(answers) == NUM_REQUESTS and answers == stock
    assert len(set(answers)) > 100  # not one answer for all
    assert (fetched, computed) == (asked, 0)
    assert late and float(late[0].rsplit(" ", 1)[1]) == NUM_REQUESTS
    steps = list((tmp_path / "runs" / "serving").glob("metrics.jsonl"))
    assert steps and len(steps[0].read_text().splitlines()) > 10


def end(shell: subprocess.Popen) -> None:
    """Wait for the shell's children to end by themselves, then end what is left."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline and children(shell.pid):
        shell.poll()
        time.sleep(0.2)
    for pid in children(shell.pid):
        os.kill(pid, signal.SIGKILL)
    shell.wait()


def children(session: int) -> list[int]:
    """Processes of a session that run."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found
