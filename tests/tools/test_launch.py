"""`weft launch` up to the first process: the call, the environment, the files, the refusals."""

import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from weft.conf import load
from weft.conf.hosts import read_hostfile, world_size
from weft.conf.schema import ScheduleKind
from weft.pipeline.generators import generate
from weft.pipeline.placement import Placement
from weft.pipeline.serialization import schedule_to_json
from weft.tools import launch
from weft.tools.launch_arguments import read_arguments
from weft.tools.preflight import CHECKS, MACHINE, check_model, preflight


@pytest.fixture
def config(tmp_path):
    loaded = load(["recipe=quickstart", f"train.output_dir={tmp_path}", "cluster.master_port=29987"])
    return loaded


def test_one_machine(config):
    call = launch.command(config, Path("/run/config.yaml"))
    assert call[call.index("--num_gpus") + 1] == "4"
    assert call[call.index("--master_port") + 1] == "29987"
    assert call[-4:] == ["--module", "weft.recipes.train", "--config-file", "/run/config.yaml"]


def test_several_machines(config, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=3\nb slots=1\n")
    config.cluster.hostfile = str(hostfile)
    given = read_arguments(["--no_ssh", "--node_rank", "1", "--config-file", "f", "a=b"])
    assert (given.overrides, given.recipe_file) == (["a=b"], "f")
    call = launch.command(config, Path("/run/config.yaml"), given.options)
    assert call[call.index("--hostfile") + 1] == str(hostfile)
    assert "--no_ssh" in call and "--node_rank=1" in call
    assert "--num_gpus" not in call, "it would overwrite uneven slots"
    assert world_size(config.cluster) == 4


def test_the_environment_is_completed_but_never_overruled(monkeypatch):
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)
    assert launch.environment({}) == {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    assert launch.environment({"OMP_NUM_THREADS": "3", "DS_ACCELERATOR": "cuda"})["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(launch, "num_gpus", lambda: 8)
    assert "DS_ACCELERATOR" not in launch.environment({})


def test_the_written_configuration_repeats_the_run(config, tmp_path):
    file = launch.write_config(config, tmp_path / "run" / "config.yaml")
    assert load([f"recipe={file}"]) == config
    assert [path.name for path in file.parent.iterdir()] == ["config.yaml"]


def test_keys_for_other_machines_are_for_the_owner_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n")
    file = launch.write_environment({"WANDB_API_KEY": "k", "PATH": "p", "HF_HOME": "h"}, tmp_path / "env")
    secret = tmp_path / "env.secrets"
    assert file.read_text() == f"MINE=1\nHF_HOME=h\nWEFT_SECRETS={secret}\n"
    assert secret.read_text() == "WANDB_API_KEY=k\n"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, secret)] == [0o600, 0o600]


def test_dry_run_starts_nothing(monkeypatch, capsys, tmp_path):
    module = type("dry_run", (), {"show": staticmethod(lambda config: print("report of", config.train.name))})
    monkeypatch.setitem(__import__("sys").modules, "weft.tools.dry_run", module)
    monkeypatch.setattr(launch, "run_group", lambda *_, **__: pytest.fail("a process would start"))
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")
    assert launch.main(["recipe=quickstart", "dry_run=true", f"train.output_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out == "report of quickstart\n"
    assert os.environ["DS_ACCELERATOR"] == "cpu", "DeepSpeed would warn that it looks for a GPU"
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("DS_ACCELERATOR")
    (tmp_path / "hosts").write_text("a slots=4\n")
    there = ["recipe=quickstart", "dry_run=true", f"cluster.hostfile={tmp_path / 'hosts'}", "cluster.master_port=29500"]
    assert launch.main(there) == 0 and "DS_ACCELERATOR" not in os.environ, "other hosts may have GPUs"


class Checked:
    """An agent of this host that finds no fault with the inputs, or one."""

    def __init__(self, code=0):
        self.code, self.asked = code, []

    def run(self, target, arguments):
        self.asked.append((target, load([], recipe_file=arguments[0])))
        return self.code


def test_a_free_port_is_chosen_and_written_down(monkeypatch, tmp_path):
    monkeypatch.setattr("weft.engine.supervision.drive", lambda folder, early: 7)
    agent = Checked()
    assert launch.run(read_arguments(["recipe=quickstart", f"train.output_dir={tmp_path}"]), agent) == 7
    written = load([f"recipe={tmp_path}/quickstart/config.yaml"])
    assert written.cluster.master_port > 0
    assert agent.asked == [("weft.tools.preflight:check_inputs", written)]


def test_inputs_that_are_refused_leave_the_run_folder_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr("weft.engine.supervision.drive", lambda folder, early: pytest.fail("ranks would start"))
    assert launch.run(read_arguments(["recipe=quickstart", f"train.output_dir={tmp_path}"]), Checked(2)) == 2
    assert not list((tmp_path / "quickstart").iterdir())


def test_a_run_of_one_host_starts_here_unless_the_launcher_has_options(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\n")

    def starts_here(*settings, options=()):
        config = load([*settings])
        return launch.starts_here(config, options, supervised=launch.is_supervised(config, options))

    assert starts_here("cluster.ranks=4") and starts_here("cluster.ranks=4", "supervise.enabled=true")
    assert starts_here("cluster.ranks=4", "supervise.enabled=false")
    assert starts_here(f"cluster.hostfile={hostfile}"), "as DeepSpeed's launcher does with one host"
    assert not starts_here(f"cluster.hostfile={hostfile}", "supervise.enabled=true"), "it may be another machine"
    assert not starts_here("cluster.ranks=4", options=["--bind_cores_to_rank"])
    hostfile.write_text("a slots=4\nb slots=4\n")
    assert not starts_here(f"cluster.hostfile={hostfile}")
    assert not starts_here(f"cluster.hostfile={hostfile}", "supervise.enabled=false")


@pytest.mark.parametrize(
    "words", [["dry_run=true"], ["--no_ssh"], ["cluster.hostfile=h"], ["--attach", "f"], ["--write", "f"]]
)
def test_nothing_starts_early_that_would_not_run_here(words):
    assert read_arguments(["recipe=quickstart"]).may_run_here
    assert not read_arguments(["recipe=quickstart", *words]).may_run_here


def test_a_port_in_use(config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config.cluster.master_port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=r"cluster\.master_port=\d+: another process listens there"):
            preflight(config)


BAD = [
    ({"cluster.ranks": 3}, "3 processes are not a multiple"),
    ({"model.path": "/nowhere"}, "there is no such folder"),
    ({"model.tokenizer": "/nowhere"}, "model.tokenizer=/nowhere: there is no such folder; give a tokenizer's"),
    ({"model.path": "/tmp"}, "no config.json in it"),
    ({"model.path": "someone/never-there"}, "no such folder, and no such model on the hub or in its cache"),
    ({"data.path": "/nowhere.jsonl", "data.kind": "text", "model.tokenizer": "t"}, "does not exist"),
    ({"pipeline.costs_file": "/nowhere.yaml"}, "costs file /nowhere.yaml: cannot be read"),
    ({"train.precision": "fp16"}, "this machine has no GPU; choose bf16"),
    ({"train.output_dir": "/proc/run"}, "choose another"),
    (
        {"model.attn_implementation": "flash_attention_2", "train.precision": "bf16"},
        "flash-attn is not installed",
    ),
]


@pytest.mark.parametrize(("settings", "part"), BAD, ids=str)
def test_what_this_machine_cannot_do_is_refused(settings, part, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.tools.preflight.num_gpus", lambda: 0)
    monkeypatch.setattr("weft.tools.preflight._is_installed", lambda package: False)
    given = {"train.output_dir": str(tmp_path)} | settings
    config = load(["recipe=quickstart", *(f"{name}={value}" for name, value in given.items())])
    with pytest.raises(ValueError) as error:
        preflight(config)
    assert part in str(error.value) and "; " in str(error.value)


def test_a_hub_is_asked_by_the_machines_that_train(tmp_path):
    hosts = tmp_path / "hostfile"
    hosts.write_text("here slots=1\nthere slots=1\n")
    config = load(
        [
            "recipe=quickstart",
            "model.path=someone/never-there",
            f"cluster.hostfile={hosts}",
            "cluster.master_addr=here",
            "cluster.master_port=29500",
        ]
    )
    check_model(config)


def test_a_folder_that_pdsh_would_split_is_refused(tmp_path, monkeypatch):
    """DeepSpeed's launcher writes the folder without quotes into a line of another host's shell."""
    hosts, spaced = tmp_path / "hosts", tmp_path / "my runs"
    hosts.write_text("here slots=1\nthere slots=1\n")
    spaced.mkdir()
    monkeypatch.chdir(spaced)
    given = ["recipe=quickstart", f"cluster.hostfile={hosts}", "cluster.master_port=29500", "dry_run=true"]
    with pytest.raises(ValueError, match=r"current folder=.*/my runs: .* without quotes; use a path"):
        launch.main(["--ssh_port", "22", *given])
    for options in (["--no_ssh"], ["--launcher", "openmpi"]):
        launch.check_remote_paths(load(given), read_arguments([*options, *given]).options)


def test_costs_for_other_stages_are_refused(config, tmp_path):
    file = tmp_path / "costs.yaml"
    file.write_text("stages: {forward_ms: [1, 2], input_ms: 1, weight_ms: 1}")
    config.pipeline.costs_file = str(file)
    with pytest.raises(ValueError, match=r"stages\.forward_ms: 2 values for 4 virtual stages"):
        preflight(config)


def test_a_dry_run_goes_by_given_costs(tmp_path):
    from weft.tools.dry_run import report

    file = tmp_path / "costs.yaml"
    file.write_text("stages: {forward_ms: 100, input_ms: 100, weight_ms: 100}")
    said = "\n".join(report(load(["recipe=quickstart", f"pipeline.costs_file={file}", "pipeline.microbatches=4"])))
    # (4 + 3) micro-batches x 300 ms
    assert f"predicted step 2.1 s, bubbles 42.9%, costs given by pipeline.costs_file={file}" in said
    assert "lower bound" not in said


def test_a_dry_run_tells_how_far_auto_is_from_the_lower_bound(tmp_path):
    from weft.tools.dry_run import report

    file = tmp_path / "costs.yaml"
    file.write_text("stages: {forward_ms: 100, input_ms: 100, weight_ms: 100}")
    settings = ["pipeline.schedule=auto", "pipeline.placement=straight", "pipeline.microbatches=4"]
    given = ["recipe=quickstart", f"pipeline.costs_file={file}", *settings, "pipeline.search_seconds=0.1"]
    said = "\n".join(report(load(given)))
    # The last rank begins after three forwards, and has twelve actions.
    assert "lower bound of 1.5 s for this placement in any memory" in said


def test_auto_tells_the_memory_cap_that_it_sets_and_what_lifts_it(tmp_path):
    from weft.tools.dry_run import expected_plan, report

    file = tmp_path / "costs.yaml"
    file.write_text("stages: {forward_ms: 100, input_ms: 100, weight_ms: 100, activation_bytes: 2e6, output_bytes: 1}")
    settings = ["pipeline.schedule=auto", "pipeline.placement=straight", "pipeline.microbatches=8"]
    given = ["recipe=quickstart", f"pipeline.costs_file={file}", *settings, "pipeline.search_seconds=0.1"]
    said = "\n".join(report(load(given)))
    plan = expected_plan(load(given))
    cap = int(plan.own_cap_bytes)
    assert cap % 2_000_000 == 0 and 8_000_000 <= cap <= 32_000_000
    line = f"of activations on each rank ({cap} bytes); pipeline.memory_cap_bytes lifts or lowers that"
    assert line in said and line in plan.summary(), "the dry run, and the log of a run"
    fixed = [*given, f"pipeline.memory_cap_bytes={cap}"]
    assert "auto has set" not in "\n".join(report(load(fixed))) + expected_plan(load(fixed)).summary()


def test_more_ranks_than_gpus(config, monkeypatch):
    monkeypatch.setattr("weft.tools.preflight.num_gpus", lambda: 2)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(ValueError, match=r"cluster\.ranks=4: this machine has 2 GPUs"):
        preflight(config)


def test_a_full_disk(config, monkeypatch):
    monkeypatch.setattr("weft.tools.preflight.shutil.disk_usage", lambda _: type("usage", (), {"free": 5e8}))
    with pytest.raises(ValueError, match=r"0\.5 GB are free there"):
        preflight(config)


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_a_home_that_cannot_be_written_is_named_before_ranks_start(variable, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    config = load(["recipe=quickstart", f"train.output_dir={tmp_path}"])
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable == "XDG_CACHE_HOME":
        config.data.cache_dir = str(tmp_path / "cache")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "home"))
    with pytest.raises(
        ValueError, match=r"(data\.cache_dir|XDG_CACHE_HOME)=.*file/home.* cannot be made .*; set another"
    ):
        preflight(config, checks=MACHINE)


def test_what_is_fine_passes_every_check(config):
    assert len(CHECKS) >= 6
    preflight(config)


HOSTFILES = [
    ("a\n", "line 1 is 'a'; write it as"),
    ("# only\n\n", "names no host"),
    ("a slots=1\na slots=2\n", "host a is listed twice"),
    ("a slots=0\n", "line 1"),
]


@pytest.mark.parametrize(("text", "part"), HOSTFILES)
def test_bad_hostfiles(text, part, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=part):
        read_hostfile(file)


def test_hosts_must_be_able_to_meet(config, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two\nnode1 slots=2\nnode2 slots=2\n")
    assert read_hostfile(file) == {"node1": 2, "node2": 2}
    away = replace(config, cluster=replace(config.cluster, hostfile=str(file)))
    with pytest.raises(ValueError, match=r"master_addr=127\.0\.0\.1: node1 cannot reach it"):
        preflight(away)


@pytest.fixture
def sft(tmp_path, monkeypatch):
    """A small model's folder with its tokenizer, one conversation, and how to configure a run of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from weft.engine.data.tokenizer import train_bpe

    monkeypatch.setattr("weft.tools.preflight.num_gpus", lambda: 0)
    tokenizer = train_bpe(["a small text"], 20)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    given = [f"model.path={tmp_path}/model", f"data.path={tmp_path}/chats.jsonl", f"train.output_dir={tmp_path}/runs"]
    return lambda *settings: load(["recipe=sft", *given, "cluster.ranks=2", *settings])


def test_a_whole_folder_passes(sft):
    preflight(sft())
    preflight(sft("model.lora.enabled=true", "model.lora.target_modules=[q_proj,mlp.up_proj]"))


def test_what_a_model_and_its_data_refuse_is_found_before_ranks_start(sft, tmp_path):
    """Errors that ranks used to detect: the template, the tokenizer, the weights, the number of layers."""
    with pytest.raises(
        ValueError, match=r"pipeline\.stages: 5 virtual stages, but .*model has 4 layers .*fewer stages"
    ):
        preflight(sft("pipeline.stages=5", "cluster.ranks=5"))
    with pytest.raises(ValueError, match=r"model\.overrides\.hiden_size: .*did you mean hidden_size"):
        preflight(sft("++model.overrides.hiden_size=3"))
    with pytest.raises(ValueError, match=r"data\.sequence_length=2049: .*model is made for 2048 positions; shorten it"):
        preflight(sft("data.sequence_length=2049"))
    preflight(sft("data.sequence_length=2049", "model.overrides={max_position_embeddings: 4096}"))
    for targets in ("nope", "q_proj,nope"):
        with pytest.raises(ValueError, match=r"target_modules=.*has no module nope; its matrices are .*q_proj"):
            preflight(sft("model.lora.enabled=true", f"model.lora.target_modules=[{targets}]"))
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ValueError, match=r"data\.chat_template=.*broken\.jinja: not a Jinja template \(line 1"):
        preflight(sft(f"data.chat_template={tmp_path}/broken.jinja"))
    with pytest.raises(ValueError, match=r"data\.chat_template=nowhere\.jinja: neither a file nor"):
        preflight(sft("data.chat_template=nowhere.jinja"))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model\.path=.*model\.safetensors has \d+ of \d+ bytes"):
        preflight(sft())
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.path=.*no model\.safetensors in it"):
        preflight(sft())
    (tmp_path / "model" / "config.json").write_text("{")
    weights.touch()
    with pytest.raises(ValueError, match=r"model\.path=.*model"):
        preflight(sft())


@pytest.mark.parametrize("own", [True, False], ids=["folder", "new model"])
def test_a_dry_run_refuses_sequences_without_positions_as_a_run_does(sft, own, tmp_path):
    from weft.tools.dry_run import show

    others = ["model.path=''", f"model.tokenizer={tmp_path}/model", "model.arch=gpt2"]
    others.append("model.overrides={n_positions: 2048, n_embd: 16, n_head: 2}")
    config = sft("data.sequence_length=2049", *([] if own else others))
    for check in (preflight, show):
        with pytest.raises(ValueError, match=r"data\.sequence_length=2049: .* is made for 2048 positions; shorten it"):
            check(config)


def test_a_schedules_file_and_a_folder_to_resume_from_are_read_before_ranks_start(config, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    config.pipeline.schedule, config.pipeline.schedule_file = ScheduleKind["file"], str(other)
    with pytest.raises(ValueError, match=r"pipeline\.schedule_file=.*other\.json: .*; write one with"):
        preflight(config)
    schedule = generate("1f1b", Placement.straight(4), 4)
    other.write_text(schedule_to_json(schedule))
    with pytest.raises(ValueError, match=r"4 micro-batches, and a step has 8; set pipeline\.microbatches=4"):
        preflight(config)
    config.pipeline.microbatches = 4
    preflight(config)
    config.pipeline.schedule = ScheduleKind["1f1b"]
    config.checkpoint.resume = str(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint\.resume=.*no complete checkpoint there; give"):
        preflight(config)
