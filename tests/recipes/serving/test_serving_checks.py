"""Tests of `weft serve`'s refusals before it starts a worker."""

import json
import os
import re
import shlex
import socket
from pathlib import Path

import pytest

from weft.conf import load
from weft.conf.schema import KvConnector
from weft.inference.board.layout import boards_folder
from weft.inference.model_sizes import cache_bytes, model_bytes, stage_bytes
from weft.inference.worker.settings import VLLM_VERSION
from weft.recipes.serving import serve
from weft.recipes.serving.checks import (
    DECODE_REMEDIES,
    FIXED_BYTES,
    REMEDIES,
    SHORT,
    check_decode,
    check_decode_gpus,
    check_engine,
    check_memory,
    check_ports,
    check_serving,
    least_gpu_bytes,
    problems_of,
    warnings_of,
)
from weft.tools.launch_arguments import num_gpus, visible_gpus

GPU = 80 * 10**9


@pytest.fixture
def llama_8b(tmp_path):
    """As the folder of Llama 3.1 8B says: 16.06 GB of weights, 131,072 bytes of cache a token."""
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    sizes |= {"vocab_size": 128_256, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_arguments_that_cannot_work_are_refused_with_what_to_do(config):
    config.inference.prefill.arguments = ["--dtype", "float32", "-pp", "2"]
    with pytest.raises(ValueError, match=r"inference\.prefill\.arguments: -pp"):
        check_serving(config)


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


@pytest.mark.parametrize("scores", [False, True])
def test_prompts_longer_than_the_models_positions_are_refused(config, llama_8b, scores):
    """A whole sequence that is scored takes one more, which is not computed."""
    described = json.loads((llama_8b / "config.json").read_text())
    (llama_8b / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 2048}))
    config.inference.prefill.model, config.inference.scores.enabled = str(llama_8b), scores
    config.inference.prefill.python = "/bin/true"
    config.inference.prefill.max_tokens = 2049 + scores
    with pytest.raises(
        ValueError, match=f"max_tokens={2049 + scores}: .* has 2048 positions .* at most {2048 + scores}"
    ):
        check_engine(config)
    config.inference.prefill.max_tokens -= 1
    check_engine(config)


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


def test_a_python_without_vllm_is_refused_before_any_process(config, tmp_path, fake_python):
    config.inference.prefill.python = fake_python(vllm=False)
    with pytest.raises(ValueError, match=r"inference\.prefill\.python=.*has no vLLM; name a Python that has it"):
        check_engine(config)
    config.inference.prefill.python = fake_python()
    check_engine(config)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0.0"])
def test_another_vllm_is_refused_before_any_process(config, fake_python, version):
    config.inference.prefill.python = fake_python(version=version)
    problem = rf"inference\.prefill\.python=.*has vLLM {version}, .*; install vllm=={VLLM_VERSION} "
    with pytest.raises(ValueError, match=problem):
        check_engine(config)


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.32.1", "", "'a warning'; echo 0.32.0"])
def test_builds_and_corrections_of_this_vllm_are_accepted(config, fake_python, version):
    config.inference.prefill.python = fake_python(version=version)
    check_engine(config)


@pytest.mark.parametrize("model", ["{}/none", "./none", "~/none", "a/b/none", "{}"])
def test_a_folder_without_a_model_is_refused_before_any_process(config, tmp_path, model, fake_python):
    config.inference.prefill.python = fake_python()
    config.inference.prefill.model = model.format(tmp_path)
    with pytest.raises(ValueError, match=r"inference\.prefill\.model=.*name a model"):
        check_engine(config)
    (tmp_path / "config.json").write_text("{}")
    config.inference.prefill.model = str(tmp_path)
    check_engine(config)


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


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize(
    "write", [str, lambda name: name.replace("-", "_"), lambda name: f"{name}=3", lambda name: f"{name}.part=3"]
)
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
