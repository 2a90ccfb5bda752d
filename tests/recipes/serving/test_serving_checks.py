"""Tests of `weft serve`'s refusals before it starts a worker."""

import ctypes
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weft.conf import load
from weft.conf.schema import KvConnector, WeftConfig
from weft.inference.board.layout import boards_folder
from weft.inference.worker.command import workers_of
from weft.recipes.serving import processes, serve
from weft.recipes.serving.checks import (
    DECODE_REMEDIES,
    FIXED_BYTES,
    REMEDIES,
    SHORT,
    cache_bytes,
    check_decode,
    check_decode_gpus,
    check_engine,
    check_memory,
    check_ports,
    check_serving,
    least_gpu_bytes,
    model_bytes,
    problems_of,
    reason_of,
    stage_bytes,
    warnings_of,
)
from weft.tools.launch_arguments import num_gpus, visible_gpus

GPU = 80 * 10**9


@pytest.fixture
def config():
    config = WeftConfig()
    config.cluster.ranks = 2
    config.inference.prefill.model = "tiny/llama"
    config.inference.prefill.first_port = 28301
    config.inference.prefill.first_side_port = 25600
    return config


@pytest.fixture
def llama_8b(tmp_path):
    """As the folder of Llama 3.1 8B says: 16.06 GB of weights, 131,072 bytes of cache a token."""
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    sizes |= {"vocab_size": 128_256, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pipeline-parallel-size", "2"],
        ["--pipeline_parallel_size=2"],
        ["-pp", "2"],
        ["-pp=2"],
        *([f"--{name}"] for name in REMEDIES),
        *([name] for name in SHORT),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_what_to_do(config, arguments):
    config.inference.prefill.arguments = ["--dtype", "float32", *arguments]
    with pytest.raises(ValueError, match=r"inference\.prefill\.arguments: -"):
        check_serving(config)


def test_other_arguments_pass():
    assert not list(problems_of(["--dtype", "float32", "--max-num-seqs=4", "pp", "model"]))


def test_ports_are_free_and_each_is_used_once(config):
    check_ports(config)
    config.inference.controller.port = 28302
    with pytest.raises(
        ValueError, match=r"first_port=28301: worker 1 would listen on 28302, which .*controller.* uses too"
    ):
        check_ports(config)
    config.inference.controller.port = 28300
    config.inference.prefill.first_side_port = 28302
    check_ports(config)  # no connector, no side ports
    config.inference.prefill.connector = KvConnector.nixl
    with pytest.raises(
        ValueError, match=r"first_port=28301: worker 1 would listen on 28302, which .*first_side_port uses too"
    ):
        check_ports(config)
    config.inference.prefill.first_side_port = 65535
    with pytest.raises(ValueError, match="would listen on 65536, above 65535"):
        check_ports(config)
    config.inference.prefill.first_side_port = 25600
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 28302))
        taken.listen()
        with pytest.raises(ValueError, match="28302, where another process listens"):
            check_ports(config)


def test_a_model_is_measured_from_its_folder(llama_8b, tmp_path):
    assert model_bytes(llama_8b) == 16_060_522_496
    assert cache_bytes(llama_8b, 4096) == 131_072 * 4096
    (llama_8b / "model.safetensors.index.json").unlink()
    (llama_8b / "a.safetensors").write_bytes(b"x" * 100)
    (llama_8b / "b.safetensors").write_bytes(b"x" * 50)
    assert model_bytes(llama_8b) == 150
    (llama_8b / "config.json").write_text("[]")
    assert cache_bytes(llama_8b, 4096) == 0


def test_a_share_that_cannot_hold_the_model_is_refused_with_one_that_can(config, llama_8b):
    config.inference.prefill.model = str(llama_8b)
    with pytest.raises(
        ValueError, match=r"memory_share=0.1: 8.0 GB of a GPU's 80.0 GB; .* needs 17.7 GB .* at least 0.22"
    ):
        check_memory(config, GPU, 0.0)
    config.inference.prefill.memory_share = 0.22 + 0.005
    said = check_memory(config, GPU, 50e9)
    assert "a worker 18.0 GB (needs at least 17.7 GB); training 50.0 GB" in said
    with pytest.raises(ValueError, match=r"18.0 GB, and training is predicted to take 70.0 GB of a GPU's 80.0 GB"):
        check_memory(config, GPU, 70e9)
    for stages in (2, 4, 8):  # at most a P-th and a tenth of the whole
        config.inference.prefill.stages = stages
        whole, part = stage_bytes(llama_8b, 1), stage_bytes(llama_8b, stages)
        assert whole / stages <= part < whole * (1 / stages + 0.1)
        config.inference.prefill.memory_share = (part + FIXED_BYTES + 1e9) / GPU
        assert "needs at least" in check_memory(config, GPU, GPU - part - 3e9)
        config.inference.prefill.memory_share = part / GPU
        with pytest.raises(ValueError, match=f"over {stages} ranks"):
            check_memory(config, GPU, 0.0)
    config.inference.prefill.stages = 1
    config.inference.prefill.ranks_per_worker, config.inference.prefill.memory_share = 2, 0.13
    check_memory(config, GPU, 0.0)
    with pytest.raises(ValueError, match="serve a smaller model"):
        check_memory(config, FIXED_BYTES, 0.0)


def test_more_stages_than_layers_are_refused(config, llama_8b):
    config.inference.prefill.model, config.inference.prefill.python = str(llama_8b), "/bin/true"
    config.inference.prefill.stages = 64
    with pytest.raises(ValueError, match=r"stages=64: .* has 32 layers; use at most 32"):
        check_engine(config)


def test_a_model_elsewhere_is_said_to_be_unchecked(config):
    assert "not checked; training not predicted" in check_memory(config, GPU, 0.0).replace(")", "")


def test_without_mps_one_is_warned(tmp_path):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    (warning,) = warnings_of(environment)
    assert "nvidia-cuda-mps-control -d" in warning
    (tmp_path / "control").touch()
    assert not list(warnings_of(environment))


def test_gpus_are_those_that_cuda_sees(monkeypatch):
    for text, seen in (("2,GPU-ab", ["2", "GPU-ab"]), ("0,-1,2", ["0"]), ("", []), (" 1 , 0", ["1", "0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible_gpus() == seen and num_gpus() == len(seen)


def fake_smi(folder, monkeypatch, text):
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_smallest_gpu_counts(tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, 'test "$3" = --id=1,GPU-x && printf "81559\\n40960\\n"')
    assert least_gpu_bytes(["1", "GPU-x"]) == 40960 * 2**20
    fake_smi(tmp_path, monkeypatch, "exit 9")
    assert least_gpu_bytes(["1"]) == 0


def test_serving_on_gpus_states_both_sides_before_a_worker_starts(config, llama_8b, tmp_path, monkeypatch, capsys):
    fake_smi(tmp_path, monkeypatch, "echo 81559")
    monkeypatch.setattr(serve, "_training_bytes", lambda _: 60e9)
    config.inference.prefill.model = str(llama_8b)
    with pytest.raises(ValueError, match=r"memory_share=0\.1"):
        serve.check_gpus(config, ["0", "1"])
    config.inference.prefill.memory_share = 0.23
    serve.check_gpus(config, ["0", "1"])
    assert "training 60.0 GB" in capsys.readouterr().out
    with pytest.raises(ValueError, match="this host has 1 GPUs"):
        serve.check_gpus(config, ["0"])


SHARE_OF_CORES = """
import ctypes, os
print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), ctypes.CDLL(None).prctl(30))
"""
"""A program that says how it is scheduled, and its timer slack in nanoseconds (30 is PR_GET_TIMERSLACK)."""


@pytest.mark.parametrize(
    ("become", "policy", "nicer", "slack_s"),
    [
        (processes.run_on_idle_cores, os.SCHED_IDLE, 0, processes.SLACK_S),
        (processes.run_below_ranks, os.SCHED_OTHER, processes.NICE, None),
    ],
)
def test_a_worker_yields_cores_as_configured(become, policy, nicer, slack_s):
    """A worker on a GPU keeps the timers that it was born with: a late one would hold up a launch."""
    words = [sys.executable, "-c", SHARE_OF_CORES]
    said = subprocess.run(words, preexec_fn=become, capture_output=True, text=True, check=True).stdout.split()
    slack_ns = ctypes.CDLL(None).prctl(30) if slack_s is None else round(slack_s * 1e9)
    assert said == [str(policy), str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + nicer)), str(slack_ns)]


def test_workers_on_gpus_and_those_that_do_not_yield_are_willing(config, monkeypatch, tmp_path):
    """SCHED_IDLE would keep a GPU worker's launches waiting for a core while its bubble passes."""
    started = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda words, **options: started.append(options["preexec_fn"]))
    config.inference.boards = str(tmp_path / "boards")
    for devices, yields in (([], True), ([], False), (["0", "1"], True)):
        monkeypatch.setattr(serve, "visible_gpus", lambda devices=devices: devices)
        config.inference.prefill.yield_cores = yields
        serve.worker_server(config, workers_of(config)[0], None).start(0.0)
    assert started == [processes.run_on_idle_cores, processes.run_below_ranks, processes.run_below_ranks]


def fake_python(path, *, vllm=True, then="true"):
    """An interpreter that has vLLM or not, and of which a server does ``then``."""
    path.write_text(f"#!/bin/sh\ncase $1 in -c) exit {int(not vllm)};; esac\n{then}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_without_vllm_is_refused_before_any_process(config, tmp_path):
    config.inference.prefill.python = fake_python(tmp_path / "python", vllm=False)
    with pytest.raises(ValueError, match=r"inference\.prefill\.python=.*has no vLLM; name a Python that has it"):
        check_engine(config)
    config.inference.prefill.python = fake_python(tmp_path / "python")
    check_engine(config)


@pytest.mark.parametrize("model", ["{}/none", "./none", "~/none", "a/b/none", "{}"])
def test_a_folder_without_a_model_is_refused_before_any_process(config, tmp_path, model):
    config.inference.prefill.python = fake_python(tmp_path / "python")
    config.inference.prefill.model = model.format(tmp_path)
    with pytest.raises(ValueError, match=r"inference\.prefill\.model=.*name a model"):
        check_engine(config)
    (tmp_path / "config.json").write_text("{}")
    config.inference.prefill.model = str(tmp_path)
    check_engine(config)


def test_a_worker_that_never_answers_ends_with_the_reason(config, tmp_path, monkeypatch, capsys):
    error = "OSError: tiny/lama is not a local folder and is not a valid model identifier"
    config.inference.prefill.python = fake_python(
        tmp_path / "python", then=f'echo "(APIServer pid=7) {error}"; echo "RuntimeError: see above"; exit 1'
    )
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    given = {
        "cluster.ranks": 2,
        "inference.boards": tmp_path / "boards",
        "inference.prefill.model": "tiny/lama",
        "inference.prefill.python": config.inference.prefill.python,
        "inference.prefill.first_port": 28401,
    }
    with pytest.raises(ValueError, match=error) as caught:
        serve.main([f"{name}={value}" for name, value in given.items()])
    assert "it has not answered once in 3 starts, log " in str(caught.value)
    assert capsys.readouterr().err.count("again in") == 4, "two workers, two more starts each"


@pytest.mark.parametrize("failing", ["worker 0", "decode server", "controller"])
def test_with_decode_the_first_server_that_does_not_start_ends_all(tmp_path, monkeypatch, failing):
    error = "OSError: no such model"
    is_failing = {"worker 0": "*scheduler-cls*", "decode server": "*8402*"}.get(failing, "*nothing*")
    then = f'case "$*" in {is_failing}) echo "{error}"; exit 1;; esac; echo $$ >>{tmp_path}/pids; exec sleep 300'
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    if failing == "controller":
        monkeypatch.setattr(serve.sys, "executable", fake_python(tmp_path / "other", then=f'echo "{error}"; exit 1'))
    given = {
        "cluster.ranks": 1,
        "inference.boards": tmp_path / "boards",
        "inference.prefill.model": "tiny/llama",
        "inference.prefill.python": fake_python(tmp_path / "python", then=then),
        "inference.prefill.first_port": 28401,
        "inference.prefill.first_side_port": 28411,
        "inference.controller.port": 28400,
        "inference.decode.port": 28402,
        "inference.decode.side_port": 28412,
    }
    with pytest.raises(
        ValueError, match=rf"^{failing}: ended with code 1; {error}; it has not answered once in 1 start"
    ):
        serve.main(["--with-decode", *(f"{name}={value}" for name, value in given.items())])
    pids = tmp_path / "pids"
    assert not any(Path("/proc", pid).exists() for pid in (pids.read_text().split() if pids.exists() else ()))


def test_sigterm_lets_the_controller_end_first(monkeypatch):
    calls = []

    class Server:
        def __init__(self, name):
            self.name, self.failure, self.polls = name, "", 3

        def check(self):
            calls.append(f"check {self.name}")
            if self.name == "controller":
                signal.raise_signal(signal.SIGTERM)

        @property
        def is_running(self):
            self.polls -= 1
            return self.polls > 0

        def send_signal(self, _):
            calls.append(f"signal {self.name}")

        def end(self, _):
            assert self.polls == 0 or self.name != "controller"
            calls.append(f"end {self.name}")

    for name in ("check_serving", "check_decode", "check_ports", "check_engine"):
        monkeypatch.setattr(serve, name, lambda _: None)
    monkeypatch.setattr(serve, "worker_server", lambda *_, **__: Server("worker"))
    monkeypatch.setattr(serve, "_decode_server", lambda _: Server("decode"))
    monkeypatch.setattr(serve, "_controller_server", lambda *_: Server("controller"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert serve.main(["--with-decode"]) == 0
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert calls[:5] == ["check worker", "check decode", "check controller", "signal controller", "signal worker"]
    assert sorted(calls[-3:]) == ["end controller", "end decode", "end worker"]


def test_who_computes_prompts_is_printed_once(config, monkeypatch, capsys):
    readiness = serve._Readiness(config)
    monkeypatch.setattr(serve, "PROBE_S", 0.0)
    for state in ({"serving": 0}, {"serving": 0}, {"serving": 1}):
        monkeypatch.setattr(
            serve.urllib.request, "urlopen", lambda *_, state=state, **__: io.StringIO(json.dumps(state))
        )
        readiness.check()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert printed[0].endswith("no training publishes bubbles, so the decode server computes prompts itself")
    assert printed[1] == "http://127.0.0.1:8300: ready, workers compute prompts in bubbles"


def test_a_decode_server_has_ports_gpus_and_arguments_of_its_own(config):
    decode = config.inference.decode
    decode.enabled, decode.port = True, config.inference.prefill.first_port
    with pytest.raises(ValueError, match=r"worker 0 would listen on 28301, which inference\.decode\.port uses too"):
        check_ports(config)
    for gpus, problem in (([], "none is given"), (["1", "2"], r"ranks train on \['1'\]")):
        decode.gpus = gpus
        with pytest.raises(ValueError, match=rf"inference\.decode\.gpus=.*{problem}; name GPUs of this host"):
            check_decode_gpus(config, ["0", "1", "2"])
    decode.gpus = ["2"]
    check_decode_gpus(config, ["0", "1", "2"])
    for name in DECODE_REMEDIES:
        decode.arguments = ["--dtype", "float32", f"--{name}=3"]
        with pytest.raises(ValueError, match=rf"inference\.decode\.arguments: --{name}=3: "):
            check_decode(config)
    decode.arguments = ["--max-model-len", "4096"]
    check_decode(config)


def test_a_worker_that_has_answered_is_started_again_for_ever(config, tmp_path, monkeypatch):
    config.inference.boards = str(tmp_path / "boards")
    config.inference.prefill.python = fake_python(tmp_path / "python", then="exit 1")
    process = serve.worker_server(config, workers_of(config)[0], None)
    process.ever_answered = True
    for _ in range(processes.MAX_STARTS + 2):
        process.start(0.0)
        process.restart("ended", 0.0)
    assert not process.failure


def test_the_reason_is_the_first_error_of_the_last_start(tmp_path):
    log = tmp_path / "log"
    assert reason_of(log, 0) == ""
    log.write_text("ValueError: of an earlier start\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("(EngineCore pid=3) ERROR 11-26 11:04:18 [core.py:1512] Traceback\n")
        file.write(
            "(EngineCore pid=3) ERROR 11-26 11:04:18 [core.py:1512] torch.OutOfMemoryError: CUDA out of memory\n"
        )
        file.write("(APIServer pid=1) RuntimeError: Engine core initialization failed\n")
    assert reason_of(log, begin) == "torch.OutOfMemoryError: CUDA out of memory"
    log.write_text(
        "(APIServer pid=1) pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no\n"
    )
    assert reason_of(log, 0) == "pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, no"


def test_the_readmes_lines_serve_prefills():
    """Trainer and servers agree, and training lasts as long as they do."""
    text = (Path(__file__).parents[3] / "README.md").read_text()
    (block,) = re.findall(r"^### 3\. Serving .*?^```\n(.*?)^```", text, re.M | re.S)
    lines = [shlex.split(line.removesuffix("&")) for line in block.splitlines()]
    assert [line[1] for line in lines] == ["serve", "launch"]
    assert lines[0].pop(2) == "--with-decode" and all(line[2] == "recipe=serving" for line in lines)
    workers, trainer = load([*lines[0][2:], *serve.WITH_DECODE]), load(lines[1][2:])
    assert trainer.train.steps >= 1_000_000
    assert not (trainer.train.max_seconds or trainer.train.epochs or trainer.train.early_stopping_patience)
    assert trainer.inference.enabled and trainer.pipeline.stages > 1, "no bubbles without a pipeline"
    assert workers.inference.prefill.connector is KvConnector.nixl, "what a worker computes reaches a decoder"
    assert len({str(boards_folder(config, 0)) for config in (trainer, workers)}) == 1
    assert workers.inference.prefill.model == "MODEL"
    assert workers.inference.prefill.arguments == workers.inference.decode.arguments, "caches fit"


@pytest.mark.parametrize("where", ["boards", "package"])
def test_workers_import_nothing_that_another_user_could_have_written(tmp_path, monkeypatch, where):
    boards = tmp_path / "boards"
    trap = boards if where == "boards" else boards / "package"
    boards.mkdir(mode=0o700)
    trap.mkdir(exist_ok=True)
    trap.chmod(0o777)
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("a process would start"))
    config = load([f"inference.boards={boards}", "inference.enabled=true"])
    (worker,) = serve.workers_of(config)
    with pytest.raises(ValueError, match=r"not a folder of this user alone"):
        serve.worker_server(config, worker, None).check()


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("write", [str, lambda name: name.replace("-", "_"), lambda name: f"{name}=3"])
def test_an_argument_that_weft_sets_or_cannot_have_is_named_with_what_to_do(name, write):
    argument = f"--{write(name)}"
    assert list(problems_of(["--seed", "3", argument])) == [f"{argument}: {REMEDIES[name]}"]


def test_short_ones_too_and_each_of_several():
    assert [text.split(":")[0] for text in problems_of(["-pp", "2", "-tp=2", "--port", "1", "-dp"])] == [
        *("-pp", "-tp=2", "--port", "-dp"),
    ]
    assert set(SHORT.values()) <= REMEDIES.keys()


@pytest.mark.parametrize("argument", ["port", "-port", "--ports", "--seed=port", "host", "--max-num-seqs", "-q", ""])
def test_others_pass(argument):
    assert list(problems_of([argument])) == []
