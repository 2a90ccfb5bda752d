"""Checkpoints are evaluated once each, with their own weights, whatever happens to workers."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from weft.conf import load
from weft.conf.hosts import run_folder
from weft.conf.schema import PrefillWorkerConfig
from weft.engine.checkpoint import Piece, save
from weft.engine.data.tokenizer import train_bpe
from weft.inference.worker.command import newest_weights, weights_folder
from weft.inference.worker.stored_weights import stored_weights
from weft.recipes.evaluated import RESULTS, Results, add_result
from weft.recipes.serving import checks, evaluator, scoring
from weft.recipes.serving.checks import check_evaluate

LENGTH = 24


class Workers:
    """Workers that load weights on request, and compute likelihoods with plain transformers."""

    def __init__(self, folder):
        self.folder, self.loaded, self.asked, self.failing = folder, {}, [], lambda number: None
        self.lock = threading.Lock()
        self.hanging, self.released = 0, threading.Event()

    @contextmanager
    def serving(self, count):
        """Yield the workers' URLs."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, {"name": outer.loaded.get(self.server.server_port, "")})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.headers["authorization"] == "Bearer secret"
                port = self.server.server_port
                if self.path == "/weft/weights":
                    outer.loaded[port] = body["name"]
                    self.answer(200, {"name": body["name"]})
                    return
                outer.asked.append(port)
                if port == outer.hanging:
                    outer.released.wait()
                if failure := outer.failing(len(outer.asked)):
                    self.answer(*failure)
                    return
                self.answer(200, {"choices": [{"prompt_logprobs": outer.likelihoods(port, body["prompt"])}]})

            def answer(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(count)]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
        self.released.set()
        for server in servers:
            server.shutdown()
            server.server_close()

    def likelihoods(self, port, ids):
        with self.lock:  # transformers loads one model at a time
            model = loaded(self.folder / self.loaded[port])
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        ranks = (logs[:-1] > logs[range(len(ids) - 1), ids[1:], None]).sum(-1) + 1
        return [None] + [
            {str(token): {"logprob": float(logs[n, token]), "rank": int(ranks[n])}} for n, token in enumerate(ids[1:])
        ]


def loaded(folder):
    """The model whose weights a worker would load."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.load_state_dict(dict(stored_weights(folder)), strict=False)  # a tied head has none
    return model.eval()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's configuration, and a function that writes one of its checkpoints and returns the model."""
    monkeypatch.setenv("WEFT_API_KEY", "secret")
    monkeypatch.setattr(scoring, "PAUSE_S", 0.0)
    monkeypatch.setattr(evaluator, "POLL_S", 0.0)
    base, data = tmp_path / "base", tmp_path / "data.jsonl"
    tokenizer = train_bpe([f"what is {n} and {n}? it is {2 * n}." for n in range(200)], 300)
    tokenizer.save_pretrained(base)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(llama).save_pretrained(base)
    data.write_text("".join(json.dumps({"text": f"what is {n}? it is {n + 1}. " * 3}) + "\n" for n in range(40)))
    settings = {
        "model.path": base,
        "data.kind": "text",
        "data.path": data,
        "data.cache_dir": tmp_path / "cache",
        "data.eval_fraction": 0.2,
        "data.sequence_length": LENGTH,
        "train.output_dir": tmp_path,
        "inference.enabled": "true",
        "inference.boards": tmp_path / "boards",
        "inference.evaluate.enabled": "true",
        "checkpoint.every": 2,
    }
    config = load([f"{name}={value}" for name, value in settings.items()])

    def write(step, **options):
        torch.manual_seed(step)
        model = LlamaForCausalLM(llama)
        pieces = [Piece.whole(f"weight/{name}", tensor) for name, tensor in model.named_parameters()]
        return save(run_folder(config) / "checkpoints", step, pieces, {}, **options), model.eval()

    return config, write


def urls_of(urls):
    return [PrefillWorkerConfig(url=url) for url in urls]


def held(_):
    raise ValueError("another run writes there")


def results(config):
    lines = (run_folder(config) / RESULTS).read_text().splitlines()
    return {line["step"]: line["metrics"] for line in map(json.loads, lines)}


def loss_of(model, documents):
    """Transformers' loss over all labels."""
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor(document.ids.astype("int64"))[None]
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def failures(number):
    """Some answers are errors, and some have no likelihoods."""
    return {2: (503, {"error": "leaving"}), 5: (200, {"choices": []}), 6: (500, {})}.get(number)


def test_each_checkpoint_is_evaluated_with_its_weights_though_workers_fail(run, capsys):
    config, write = run
    workers = Workers(weights_folder(config))
    workers.failing = failures
    with workers.serving(2) as urls:
        config.inference.controller.workers = urls_of(urls)
        evaluating = evaluator.Evaluator(config)
        models = {step: write(step)[1] for step in (2, 4)}
        for _ in range(4):
            evaluating.check()
        models[6] = write(6)[1]
        evaluating.check()
        found = results(config)
        documents = evaluating._held_out()
    assert list(found) == [2, 4, 6] and 1 < len(documents) < 40
    for step, model in models.items():
        expected = loss_of(model, documents)
        assert found[step]["loss"] == pytest.approx(expected, rel=1e-6)
        assert found[step]["perplexity"] == pytest.approx(exp(expected), rel=1e-6)
    assert len(set(workers.asked)) == 2, "both workers have a share"
    assert newest_weights(config).name.endswith("step-6") and len(list(weights_folder(config).glob("0*"))) == 2
    logged = [json.loads(line) for line in (run_folder(config) / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in logged] == [("checkpoint", step) for step in (2, 4, 6)]
    results_file = Results(run_folder(config))
    assert not list(results_file.take()), "all are in the log"
    add_result(run_folder(config), step=4, serial=9, metrics={"loss": 1.0})
    assert list(results_file.take()) == [(4, {"loss": 1.0})], "the run went back, and saved step 4 again"


def test_a_worker_that_hangs_loses_its_documents_to_others_and_gets_no_more(run, monkeypatch):
    config, write = run
    monkeypatch.setattr(scoring, "ANSWER_S", 3.0)
    workers = Workers(weights_folder(config))
    with workers.serving(2) as urls:
        config.inference.controller.workers = urls_of(urls)
        workers.hanging = int(urls[0].rpartition(":")[2])
        _, model = write(2)
        evaluating = evaluator.Evaluator(config)
        evaluating.check()
        documents = evaluating._held_out()
    assert results(config)[2]["loss"] == pytest.approx(loss_of(model, documents), rel=1e-6)
    assert 1 <= workers.asked.count(workers.hanging) <= 2 * scoring.AT_ONCE < len(workers.asked)


def test_while_the_run_trains_its_own_process_logs(run, monkeypatch):
    config, write = run
    monkeypatch.setattr(evaluator.RunLock, "check", held)  # a process's own lock never stops it
    with Workers(weights_folder(config)).serving(1) as urls:
        config.inference.controller.workers = urls_of(urls)
        write(2)
        evaluator.Evaluator(config).check()
    assert not (run_folder(config) / "metrics.jsonl").exists() and list(results(config)) == [2]


def test_a_checkpoint_that_is_damaged_or_gone_is_left_out_by_name(run, capsys, monkeypatch):
    config, write = run
    with Workers(weights_folder(config)).serving(1) as urls:
        config.inference.controller.workers = urls_of(urls)
        damaged = write(2)[0] / "rank-000.safetensors"
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1  # a weight's
        damaged.write_bytes(data)
        write(4)
        evaluating = evaluator.Evaluator(config)
        for _ in range(evaluator.TRIES + 2):
            evaluating.check()
    assert list(results(config)) == [4]
    assert capsys.readouterr().out.count("step 2: not evaluated: ") == evaluator.TRIES


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"inference.enabled": "false"}, "inference.enabled=false: ranks publish no bubbles"),
        ({"inference.prefill.model": "a/b"}, "inference.prefill.model=a/b: .*leave it out"),
        ({"inference.prefill.stages": 2}, "inference.prefill.stages=2: .*set it to 1"),
        (
            {"inference.decode.enabled": "true", "inference.prefill.connector": "nixl"},
            "inference.decode.enabled=true: .*without --with-decode",
        ),
        ({"model.lora.enabled": "true"}, "model.lora.enabled=true: adapters are not merged"),
        ({"checkpoint.every": 0}, "checkpoint.every=0: .*set it"),
        ({"data.eval_fraction": 0}, "data.eval_fraction=0: nothing is held out"),
        (
            {"inference.prefill.arguments": "['--load-format=auto']"},
            "inference.prefill.arguments: .*load-format.*leave it out",
        ),
        ({"inference.evaluate.tasks": "[arc]"}, "inference.evaluate.tasks=.'arc'.: not installed"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(given, problem, monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    usual = {"inference.enabled": "true", "inference.evaluate.enabled": "true", "data.eval_fraction": 0.1}
    settings = usual | {"checkpoint.every": 2, "model.path": "a", "data.kind": "text", "data.path": "b"} | given
    with pytest.raises(ValueError, match=problem):
        check_evaluate(load([f"{name}={value}" for name, value in settings.items()]))


@pytest.mark.slow
def test_tasks_of_the_harness_get_the_likelihoods_of_plain_transformers(run, tmp_path):
    pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'weft[evaluate]'")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from weft.recipes.serving.harness import check_tasks

    config, write = run
    _, model = write(2)
    rows = [{"q": f"what is {n}?", "choices": [f" it is {n + 1}.", f" {n}"], "gold": n % 2} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        "task: sums",
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}",
        "test_split: test",
        "output_type: multiple_choice",
        "doc_to_text: '{{q}}'",
        "doc_to_target: gold",
        "doc_to_choice: '{{choices}}'",
        "metric_list: [{metric: acc}, {metric: acc_norm}]",
    ]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text("\n".join(lines))
    config.inference.evaluate.tasks, config.inference.evaluate.task_folder = ["sums"], str(tmp_path / "tasks")
    with Workers(weights_folder(config)).serving(1) as urls:
        config.inference.controller.workers = urls_of(urls)
        evaluator.Evaluator(config).check()
    found = results(config)[2]
    folder = newest_weights(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    given = {"tasks": ["sums"], "task_manager": own, "bootstrap_iters": 0}
    peer = simple_evaluate(HFLM(pretrained=model, tokenizer=tokenizer, device="cpu"), **given)["results"]["sums"]
    accuracy = {f"sums/{name}": peer[f"{name},none"] for name in ("acc", "acc_norm")}
    assert accuracy == {name: found[name] for name in accuracy}
    config.inference.evaluate.tasks = ["sum"]
    with pytest.raises(ValueError, match=r"evaluate\.tasks: no task sum among"):
        check_tasks(config.inference.evaluate)
