"""How workers are started: from the recipe, without loss on the way, and refused with a reason."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from weft.conf.checks import check
from weft.conf.schema import DecodeConfig, KvConnector, WeftConfig
from weft.inference.worker.command import (
    WAN_MBPS,
    addresses,
    command,
    cost_link,
    devices_of,
    environment,
    interpreter,
    kv_transfer,
    server_key,
    settings_of,
    stage_file,
    workers_of,
)
from weft.inference.worker.decoder import continues_answers, decode_command, decode_environment, decode_url
from weft.inference.worker.settings import WorkerSettings
from weft.recipes.serving.checks import check_serving


@pytest.fixture
def config():
    config = WeftConfig()
    config.cluster.ranks = 4
    config.inference.prefill.model = "tiny/llama"
    return config


def option(words, name):
    return words[words.index(name) + 1]


@pytest.mark.parametrize(("each", "ranks"), [(1, [(0,), (1,), (2,), (3,)]), (2, [(0, 1), (2, 3)]), (4, [(0, 1, 2, 3)])])
def test_each_rank_has_one_worker_on_a_port_of_its_own(config, each, ranks):
    config.inference.prefill.ranks_per_worker = each
    workers = workers_of(config)
    assert [worker.ranks for worker in workers] == ranks
    assert len({worker.port for worker in workers}) == len(workers)
    assert all(len(worker.boards) == each for worker in workers)
    assert [address.url.rpartition(":")[2] for address in addresses(config)] == [str(w.port) for w in workers]


@pytest.mark.parametrize(("stages", "ranks"), [(2, [(0, 1), (2, 3)]), (4, [(0, 1, 2, 3)])])
def test_a_worker_of_several_stages_spans_as_many_ranks_and_splits_its_cache(config, stages, ranks):
    config.inference.prefill.stages = stages
    workers = workers_of(config)
    assert [worker.ranks for worker in workers] == ranks
    words = command(config, workers[0], python="python", num_gpus=0)
    assert option(words, "--pipeline-parallel-size") == str(stages)
    assert option(words, "--distributed-executor-backend") == "mp"
    assert option(words, "--worker-cls").endswith("StageWorker")
    assert int(option(words, "--kv-cache-memory-bytes")) * stages == config.inference.prefill.kv_cache_bytes
    settings = WorkerSettings.of(json.loads(option(words, "--additional-config")))
    assert (settings.stages, len(settings.boards)) == (stages, stages)
    assert environment(config, workers[0], {}, package=Path("p"), key="")["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    words = command(config, workers[0], python="python", num_gpus=4)
    assert (option(words, "--tensor-parallel-size"), option(words, "--pipeline-parallel-size")) == ("1", str(stages))


def test_costs_of_a_stage_are_kept_apart_from_those_of_the_whole_model(config):
    files = set()
    for stages in (1, 2, 4):
        config.inference.prefill.stages = stages
        file = Path(settings_of(config, workers_of(config)[0]).cost_file)
        files |= {stage_file(file, stage) for stage in range(stages)}
    assert len(files) == 1 + 2 + 4
    assert stage_file(Path("a/worker0.cost"), 2) == Path("a/worker0.stage2.cost")


@pytest.mark.parametrize(("stages", "name"), [(1, "QuietNixlConnector"), (2, "QuietNixlPushConnector")])
def test_each_stage_sends_its_cache_and_that_of_a_whole_model_is_read(config, stages, name):
    config.inference.prefill.stages, config.inference.prefill.connector = stages, KvConnector.nixl
    check(config)
    worker = command(config, workers_of(config)[0], python="python", num_gpus=0)
    for words in (worker, decode_command(config, python="python")):
        assert json.loads(option(words, "--kv-transfer-config"))["kv_connector"] == name


@pytest.mark.parametrize(("stages", "each", "word"), [(3, 1, "stages=3: 4 ranks"), (2, 2, "ranks_per_worker=1")])
def test_stages_that_do_not_fit_the_ranks_are_refused(config, stages, each, word):
    config.inference.prefill.stages, config.inference.prefill.ranks_per_worker = stages, each
    with pytest.raises(ValueError, match=word):
        check(config)


@pytest.mark.parametrize(
    ("each", "ranks", "word"),
    [
        (3, [], "ranks_per_worker=3: 4 ranks"),
        (1, [0, 0], "distinct ranks"),
        (1, [-1], "distinct ranks"),
        (1, [4], "there are 4 ranks"),
    ],
)
def test_ranks_that_cannot_be_shared_out_are_refused(config, each, ranks, word):
    config.inference.prefill = replace(config.inference.prefill, ranks_per_worker=each, ranks=ranks)
    with pytest.raises(ValueError, match=word):
        check(config)


@pytest.mark.parametrize("gpus", [0, 4])
def test_a_workers_command_has_its_settings(config, gpus):
    config.inference.prefill.guard_s = 0.0125
    worker = workers_of(config)[2]
    words = command(config, worker, python="python", num_gpus=gpus, trace_file="/tmp/t.jsonl")
    settings = WorkerSettings.of(json.loads(option(words, "--additional-config")))
    assert settings == settings_of(config, worker, trace_file="/tmp/t.jsonl")
    assert settings.guard_s == 0.0125
    assert {"--no-async-scheduling", "--uvicorn-log-level=error"} <= set(words)
    assert ("--gpu-memory-utilization" in words) == bool(gpus)
    assert option(words, "--middleware") == "weft.inference.worker.vllm_middleware.PrefillOnlyMiddleware"
    config.inference.prefill.allow_decode = True
    assert option(command(config, worker, python="python", num_gpus=gpus), "--middleware").endswith(".ApiMiddleware")


def test_kv_caches_leave_by_the_connector_that_is_set(config):
    worker = workers_of(config)[0]
    assert "--kv-transfer-config" not in command(config, worker, python="python", num_gpus=0)
    config.inference.prefill.connector = KvConnector.nixl
    words = command(config, worker, python="python", num_gpus=0)
    assert json.loads(option(words, "--kv-transfer-config")) == kv_transfer(config.inference.prefill, on_cpu=True)


def test_paths_hold_in_the_folder_in_which_servers_run(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "llama").mkdir()
    prefill, config.inference.boards = config.inference.prefill, "boards"
    worker = workers_of(config)[0]
    assert Path(worker.boards[0]) == tmp_path / "boards" / "rank0.board"
    prefill.python = "bin/python"
    assert interpreter(prefill) == str(tmp_path / "bin" / "python")
    for name in ("llama", "./llama", "~/llama", str(tmp_path / "llama")):
        prefill.model = name
        for words in (command(config, worker, python="p", num_gpus=0), decode_command(config, python="p")):
            assert option(words, "--model") == str(tmp_path / "llama")
            assert ("--served-model-name" in words) == (name != option(words, "--model"))
            assert name in words, "clients name the model as the settings do"
    prefill.model = "hub/llama"
    assert option(command(config, worker, python="p", num_gpus=0), "--model") == "hub/llama"


@pytest.mark.parametrize(
    ("settings", "continues"),
    [
        ({}, True),
        ({"url": "http://other:1"}, False),
        ({"enabled": False}, False),
        ({"arguments": ["--dtype", "float32", "--max_num_queued_reqs=64", "--enable-lora"]}, True),
        ({"arguments": ["--reasoning-parser", "qwen3"]}, False),
        ({"arguments": ["--speculative-config.method=ngram"]}, False),
        ({"arguments": ["-sc.method=ngram"]}, False),
        ({"arguments": ["--enable_auto_tool_choice"]}, False),
    ],
)
def test_the_decode_server_continues_a_workers_token_unless_it_may_change_a_streams_text(config, settings, continues):
    config.inference.decode.enabled = True
    config.inference.decode = replace(config.inference.decode, **settings)
    assert continues_answers(config) == continues
    assert ("--logits-processors" in decode_command(config, python="python")) == continues
    config.inference.prefill.arguments = ["--tokenizer", "another"]
    assert not continues_answers(config)


@pytest.mark.parametrize("gpus", [[], ["6", "7"]])
def test_the_decode_server_fetches_from_equal_workers_only_and_computes_what_it_cannot_fetch(config, tmp_path, gpus):
    decode = config.inference.decode
    decode.gpus, decode.enabled, decode.arguments = gpus, True, ["--dtype", "float32"]
    words = decode_command(config, python="python")
    transfer = json.loads(option(words, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"]["enforce_handshake_compat"] is True
    assert option(words, "--dtype") == "float32" and option(words, "--model") == config.inference.prefill.model
    assert {"--enable-scale-out", "--uvicorn-log-level=error"} <= set(words)  # the first lets it render prompts
    assert ("--enforce-eager" in words) == ("--kv-cache-memory-bytes" in words) == (not gpus)
    env = decode_environment(config, {}, key="s3cret", package=tmp_path)
    assert env["VLLM_API_KEY"] == "s3cret" and env.get("CUDA_VISIBLE_DEVICES", "") == ",".join(gpus)
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    assert decode_url(decode) == "http://127.0.0.1:8400"
    decode.url = "http://other:1/"
    assert decode_url(decode) == "http://other:1"
    decode.enabled = False
    assert decode_url(decode) == ""


@pytest.mark.parametrize(("enabled", "url", "word"), [(True, "", "set it to nixl"), (False, "other:1", "not an HTTP")])
def test_a_decode_server_that_cannot_fetch_is_refused(config, enabled, url, word):
    config.inference.decode = DecodeConfig(enabled=enabled, url=url)
    with pytest.raises(ValueError, match=word):
        check(config)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_caches_for_another_site_come_from_host_memory_at_the_given_rate(config, num_gpus):
    prefill = config.inference.prefill
    prefill.connector, prefill.cache_mbps = KvConnector.wan, 250.0
    words = command(config, workers_of(config)[0], python="python", num_gpus=num_gpus)
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_buffer_device"] == "cpu"
    assert transfer["kv_connector_extra_config"][WAN_MBPS] == 250.0
    prefill.connector = KvConnector.nixl
    assert WAN_MBPS not in kv_transfer(prefill, on_cpu=True)["kv_connector_extra_config"]


def test_all_processes_of_a_run_share_a_key_that_others_cannot_read(config, tmp_path):
    config.inference.boards = str(tmp_path / "boards")
    with ThreadPoolExecutor(8) as pool:
        (key,) = set(pool.map(lambda _: server_key(config, {}), range(50)))
    (file,) = (tmp_path / "boards").iterdir()
    assert (file.stat().st_mode & 0o777, len(key)) == (0o600, 64)
    assert server_key(config, {"WEFT_API_KEY": "s3cret"}) == "s3cret"


def test_the_key_is_never_on_the_command_line(config, tmp_path):
    worker = workers_of(config)[0]
    env = environment(config, worker, {}, key="s3cret", package=tmp_path)
    assert env["VLLM_API_KEY"] == "s3cret"
    assert not any("s3cret" in word for word in command(config, worker, python="python", num_gpus=0))


@pytest.mark.parametrize(
    ("ranks", "visible", "given"),
    [
        ([0, 1, 2, 3], ["0", "1", "2", "3"], ["0", "1", "2", "3"]),
        ([1, 3], ["4", "5", "6", "7"], ["5", "7"]),
        ([0, 1], ["GPU-aa", "MIG-bb"], ["GPU-aa", "MIG-bb"]),
    ],
)
def test_a_worker_gets_the_gpus_that_its_ranks_train_on(config, tmp_path, ranks, visible, given):
    config.inference.prefill.ranks = ranks
    for worker, device in zip(workers_of(config), given, strict=True):
        env = environment(config, worker, {"CUDA_VISIBLE_DEVICES": "9"}, key="k", package=tmp_path, devices=visible)
        assert env["CUDA_VISIBLE_DEVICES"] == device
    config.inference.prefill.ranks_per_worker = 2
    (worker, *_) = workers_of(config)
    env = environment(config, worker, {}, key="k", package=tmp_path, devices=visible)
    assert env["CUDA_VISIBLE_DEVICES"] == ",".join(given[:2])


def test_ranks_of_a_host_count_from_its_first(config, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=3\n")
    config.cluster.hostfile, config.inference.prefill.ranks = str(hosts), [2, 4]
    found = [devices_of(config, worker, ["GPU-x", "GPU-y", "GPU-z"]) for worker in workers_of(config)]
    assert found == [["GPU-x"], ["GPU-z"]]
    with pytest.raises(ValueError, match=r"ranks=\[4\]: this host has 2 GPUs .* for its ranks from 2 on"):
        devices_of(config, workers_of(config)[1], ["0", "1"])


def test_each_worker_meets_decoders_on_a_port_of_its_own(config, tmp_path):
    config.inference.prefill.first_side_port = 7000
    envs = [environment(config, worker, {}, key="k", package=tmp_path) for worker in workers_of(config)]
    assert [env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for env in envs] == ["7000", "7001", "7002", "7003"]
    assert len({env["WEFT_WORKER_STATUS"] for env in envs}) == 4


def test_serving_nothing_or_everyone_is_refused(config, monkeypatch):
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    check_serving(config)
    config.inference.prefill.host = "0.0.0.0"
    with pytest.raises(ValueError, match="there is no API key"):
        check_serving(config)
    config.inference.prefill = replace(config.inference.prefill, host="127.0.0.1", model="")
    with pytest.raises(ValueError, match="no model is given"):
        check_serving(config)
    config.inference.prefill = replace(config.inference.prefill, model="m", python="/no/such/python")
    with pytest.raises(ValueError, match="cannot be run"):
        check_serving(config)


@pytest.mark.parametrize("given", [None, {}, {"weft": 3}, {"weft": {"boards": []}}, {"weft": {"borads": []}}])
def test_settings_that_are_missing_or_misspelt_are_named(given):
    with pytest.raises(ValueError, match="additional_config"):
        WorkerSettings.of(given)


@pytest.mark.parametrize("model", ["tiny/llama", "another/name", ""])
def test_a_controller_finds_the_cost_models_whatever_it_calls_the_model(config, model):
    published = [address.cost for address in addresses(config)]
    config.inference.prefill.model = model
    assert [address.cost for address in addresses(config)] == published
    assert published == [str(cost_link(worker.status)) for worker in workers_of(config)]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("training", "serving"),
    [
        ("expandable_segments:True", ""),
        ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"),
        ("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64"),
        ("roundup_power2_divisions:[256:1,512:2], expandable_segments: true", "roundup_power2_divisions:[256:1,512:2]"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_a_worker_with_nixl_has_no_expandable_segments(config, tmp_path, name, training, serving):
    worker = workers_of(config)[0]
    assert environment(config, worker, {name: training}, key="k", package=tmp_path)[name] == training
    config.inference.prefill.connector = KvConnector.nixl
    assert environment(config, worker, {name: training}, key="k", package=tmp_path)[name] == serving


def test_a_decoder_recomputes_what_it_cannot_fetch(config):
    assert kv_transfer(config.inference.prefill, on_cpu=True)["kv_load_failure_policy"] == "recompute"
    documented = (Path(__file__).parents[3] / "docs" / "serving_reference.md").read_text()
    assert '"kv_load_failure_policy": "recompute"' in documented


def test_a_worker_compiles_nothing_at_a_clients_first_request(config, tmp_path):
    worker = workers_of(config)[0]
    assert environment(config, worker, {}, key="k", package=tmp_path)["TORCH_COMPILE_DISABLE"] == "1"
    chosen = environment(config, worker, {"TORCH_COMPILE_DISABLE": "0"}, key="k", package=tmp_path)
    assert chosen["TORCH_COMPILE_DISABLE"] == "0"
