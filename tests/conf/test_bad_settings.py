"""Every bad setting ends in one clear error: the settings, and a part of the message."""

import pytest

from weft.conf import load
from weft.conf.batch import check_world
from weft.conf.schema import ScheduleKind, WeftConfig

MIXED = ["data.kind=text", "model.path=y"]
CHAT = ["data.kind=chat", "data.path=x", "model.path=y"]
TWO_SITES = "cluster.sites=[{name: a, ranks: 1}, {name: b, ranks: 1}]"

BAD = [
    # names, types and choices
    (["trian.steps=1"], "there is no field trian.steps; did you mean train.steps?"),
    (["optimizer.learning_rate=1e-5"], "there is no field optimizer.learning_rate; did you mean optimizer.lr?"),
    (["train.max_steps=5"], "there is no field train.max_steps; did you mean train.steps?"),
    (["train.per_device_train_batch_size=5"], "did you mean train.microbatch_size?"),
    (["pipeline.stage=2"], "did you mean pipeline.stages?"),
    (["cluster.rank=2"], "did you mean cluster.ranks?"),
    (["cluster.port=1"], "did you mean cluster.master_port?"),
    (["optimizer.min_lr=1e-5"], "did you mean optimizer.min_lr_ratio?"),
    (["optimizer.warmup=9"], "did you mean optimizer.warmup_steps or optimizer.warmup_ratio?"),
    (["model.name=a/b"], "did you mean model.path?"),
    (["parallel.tp=2"], "did you mean parallel.tensor?"),
    (["logging.steps=5"], "did you mean logging.every?"),
    (["Train.Seed=5"], "did you mean train.seed?"),
    (["name=a"], "did you mean data.name or train.name?"),
    (["train.push_to_hub=true"], "did you mean train.hub_model_id?"),
    (["comm.backend=nccl"], "there is no field comm.backend; comm has timeout_s, deadline_s, connections"),
    # parallelism inside of a layer
    (["parallel.tensor=0"], "parallel.tensor=0: outside its range"),
    (
        ["parallel.tensor=3", "data.sequence_length=64"],
        "data.sequence_length=64: parallel.context=1 x parallel.tensor=3",
    ),
    (["parallel.context=2", "data.sequence_length=6"], "choose a multiple of 4, such as 8"),
    (["parallel.tensor=2", "parallel.expert=3"], "parallel.expert=3: ranks that share matrices (parallel.tensor=2)"),
    (["parallel.tensor=2", "comm.cell=2"], "comm.cell=2: the pipelines of a DP-cell take turns"),
    (
        ["parallel.tensor=2", "optimizer.kind=lamb"],
        "optimizer.kind=lamb: its step depends on the norm of a whole matrix",
    ),
    (
        ["parallel.expert=2", "optimizer.kind=muon"],
        "optimizer.kind=muon: its step depends on a whole matrix, which parallel.expert=2 cuts",
    ),
    (["optimizer.state=bf16", "optimizer.kind=lamb"], "optimizer.state=bf16: optimizer.kind=lamb has fp32 state only"),
    (["optimizer.state=int8", "optimizer.kind=muon"], "optimizer.state=int8: optimizer.kind=muon has fp32 state only"),
    (
        ["optimizer.state=int8", "parallel.tensor=2"],
        "optimizer.state=int8: parallel.tensor=2 cuts matrices, and the blocks that share a scale with them; set",
    ),
    (["optimizer=sgd", "optimizer.muon_momentum=0.8"], "optimizer.muon_momentum=0.8: only optimizer.kind=muon uses it"),
    (["optimizer.muon_lr=0.02"], "optimizer.muon_lr=0.02: only optimizer.kind=muon uses it; set that"),
    (["optimizer.momentum=0.8"], "optimizer.betas"),
    (["train.step=1"], "did you mean train.steps?"),
    (["train.lr=1"], "did you mean optimizer.lr?"),
    (["++foo=1"], "`weft config` lists every field"),
    (["train.steps=abc"], "train.steps='abc': expected an integer"),
    (["train.steps=1.5"], "expected an integer"),
    (["train.output_dir=$HOME/runs"], "$HOME is a shell's variable, and no shell reads it; write ${oc.env:HOME}"),
    (["model.lora.target_modules=[q, 1e3]"], "a text in it would become 1000.0; put it in quotes"),
    (["data.sources=[{path: 2024_01}]", *MIXED], "a text in it would become 202401; put it in quotes"),
    (["train.steps=null"], "train.steps=null: expected an integer"),
    (["dry_run=maybe"], "expected true or false"),
    (["optimizer.betas=3"], "expected a list such as"),
    (["optimizer.betas=[a,b]"], "optimizer.betas[0]='a'"),
    (["model.overrides=3"], "expected a mapping"),
    (["cluster.sites=[1]"], "expected a list of {name, hosts, ranks, nodes, spares, select}"),
    (["cluster.sites=[{name: a, ranks: x}]"], "cluster.sites.ranks='x': expected an integer"),
    (["cluster.sites=[{nam: a}]"], "there is no field nam; did you mean name?"),
    (["pipeline.schedule=2f2b"], "expected one of gpipe, 1f1b, interleaved, w"),
    (["train.precision=int8"], "expected one of fp32, bf16, fp16"),
    (["model=tiny_lama"], "did you mean model=tiny_llama?"),
    (["recipe=quikstart"], "did you mean recipe=quickstart?"),
    (["recipe=zzz"], "a recipe of your own is given as recipe=FILE.yaml"),
    (["recipe=sft", "recipe=lora"], "one recipe at a time"),
    (["recipe=/nowhere.yaml"], "No such file"),
    (["train.steps"], "write key=value"),
    (["~train.steps"], "fields cannot be removed"),
    (["model@train=tiny_llama"], "write model=NAME"),
    (["hydra.run.dir=x"], "there is no field hydra.run.dir"),
    (["--multirun"], "a sweep would run once per rank"),
    (["-m"], "a sweep would run once per rank"),
    (["train.steps=1,2"], "a sweep would run once per rank"),
    (["--stages=2"], "settings are written key=value"),
    # ranges
    (["train.steps=0"], "train.steps=0: outside its range; choose a value at least 1"),
    (["model.lora.dropout=1"], "at least 0 and below 1"),
    (["optimizer.lr=0"], "above 0"),
    (["optimizer.lr=1e30"], "choose a value at most 9.2e+18"),
    (["cluster.master_port=99999"], "at most 65535"),
    (["train.microbatch_size=0"], "train.microbatch_size=0"),
    (["optimizer.betas=[0.9]"], "not two numbers"),
    (["optimizer.betas=[0.9,1.0]"], "not two numbers"),
    # model and data
    (["model.arch=''"], "set model.path"),
    (["model.arch=qwen3", "model.path=y"], "model.arch=qwen3: model.path=y has an architecture of its own"),
    (["model.attn_implementation=flash_attention_2"], "takes no fp32; set train.precision=bf16"),
    (["model.lora.target_modules=[q_proj]"], "set model.lora.enabled=true"),
    (["model.lora.rank=16"], "model.lora.rank=16: adapters are off; set model.lora.enabled=true, or leave rank at 8"),
    (["model.lora.alpha=32"], "model.lora.alpha=32.0: adapters are off"),
    (["model.lora.dropout=0.1"], "model.lora.dropout=0.1: adapters are off"),
    (["data.path=x"], "unused by data.kind=corpus"),
    (["data.kind=text", "model.path=y"], "data.path='': data.kind=text needs a source"),
    (["data.kind=text", "data.path=x"], "model.tokenizer='': data.kind=text needs a tokenizer"),
    (["data.chat_template=x"], "set data.kind=chat"),
    ([*CHAT, "train.eval_every=5"], "there is no evaluation data"),
    ([*MIXED, "data.sources=[{path: a, weight: 0}]"], "data.sources[0].weight=0: outside its range; choose a value ab"),
    ([*MIXED, "data.sources=[{path: a}, {path: b, weight: -1}]"], "data.sources[1].weight=-1: outside its range"),
    ([*MIXED, "data.sources=[{path: a, weight: nan}]"], "data.sources[0].weight=nan: outside its range"),
    ([*MIXED, "data.sources=[{path: a, epochs: -1}]"], "data.sources[0].epochs=-1: outside its range"),
    ([*MIXED, "data.sources=[{path: a}, {path: a}]"], "data.sources[1].path=a: the same as data.sources[0]"),
    ([*MIXED, "data.sources=[{weight: 1}]"], "data.sources[0].path='': each source needs one"),
    ([*MIXED, "data.sources=[{path: a}]", "data.path=b"], "data.path=b: data.sources replaces it"),
    ([*MIXED, "data.sources=[{path: a}]", "train.epochs=1"], "set data.sources[].epochs for all, or train.steps"),
    ([*MIXED, "data.sources=[{path: a, wieght: 1}]"], "did you mean weight?"),
    (["data.sources=[{path: a}]"], "data.sources: unused by data.kind=corpus; set data.kind"),
    # pipeline
    (
        ["pipeline.schedule=w", "pipeline.placement=straight", "pipeline.stages=2"],
        "the w schedule is defined for fold or site_fold",
    ),
    (["pipeline.placement=fold", "pipeline.stages=2"], "the 1f1b schedule is defined for straight"),
    (["pipeline=w"], "a fold needs at least 2 ranks"),
    (["pipeline=dualpipev", "pipeline.stages=8"], "needs at least 2 x 8 stages = 16"),
    (["pipeline=interleaved", "pipeline.chunks_per_rank=1"], "the interleaved schedule needs at least 2"),
    (["pipeline.schedule=file"], "set both or neither"),
    (["pipeline.schedule_file=x"], "set both or neither"),
    (["pipeline.schedule=file", "pipeline.schedule_file=/nowhere"], "there is no such file"),
    (["pipeline.adapt=true"], "pipeline.schedule=1f1b depends on no costs"),
    (["pipeline.jitter_samples=4"], "pipeline.jitter_samples=4: schedule=1f1b depends on no costs"),
    (["pipeline.jitter_samples=4"], "without pipeline.costs_file no jitter is known"),
    (["pipeline.jitter_samples=4", "pipeline.offload=true"], "pipeline.offload=true are planned with medians"),
    (["pipeline.jitter_samples=2000"], "pipeline.jitter_samples=2000"),
    (["pipeline.adapt=true", "comm.cell=2"], "does not work with comm.cell=2"),
    (["pipeline.adapt=true", "zero.stage=3"], "does not work with zero.stage=3"),
    (["pipeline.adapt=true", "parallel.tensor=2"], "does not work with parallel.tensor=2"),
    (["pipeline.adapt=true", "cluster.routes=[[a], [b]]"], "does not work with cluster.routes"),
    (["pipeline.layers=[1,2]"], "2 entries for 1 virtual stages"),
    (["pipeline.layers=[-1]"], "fewer than 0 layers"),
    (["model=tiny_llama", "pipeline.layers=[7]"], "they hold 7 layers, the model has 8"),
    (["model=tiny_llama", "pipeline.stages=9"], "9 virtual stages for model.overrides.num_hidden_layers=8"),
    # cluster
    ([TWO_SITES], "the sites hold 1 + 1 = 2 pipeline ranks"),
    (["cluster.sites=[{ranks: 1}]"], "give every site a unique name"),
    (["cluster.sites=[{name: a, ranks: 1}, {name: a, ranks: 1}]", "pipeline.stages=2"], "2 sites have this name"),
    (["cluster.sites=[{name: a, ranks: 0}]"], "holds no pipeline rank"),
    ([TWO_SITES, "pipeline.stages=2", "cluster.links=[{sites: [a]}]"], "a link joins two sites"),
    ([TWO_SITES, "pipeline.stages=2", "cluster.links=[{sites: [a, c]}]"], "cluster.sites has a, b"),
    ([TWO_SITES, "pipeline.stages=2", "cluster.links=[{sites: [a, b]}, {sites: [b, a]}]"], "given twice"),
    ([TWO_SITES, "pipeline.stages=2", "cluster.links=[{sites: [a, b], latency_ms: -1}]"], "at least 0"),
    (["cluster.hostfile=/nowhere"], "there is no such file"),
    (["cluster.master_addr=''"], "nowhere to meet"),
    # run
    (["zero.stage=4"], "at least 0 and at most 3"),
    (["zero.reduce_every=-1"], "at least 0"),
    (["train.batch_size=6", "train.microbatch_size=4"], "not a multiple of train.microbatch_size=4 = 4; choose 8"),
    (
        ["train.batch_size=6", "pipeline.microbatches=4"],
        "train.microbatch_size=1 x pipeline.microbatches=4 = 4; choose 8",
    ),
    (["pipeline.microbatches=0"], "it follows from train.batch_size, which is 0"),
    (["train.name=a/b"], "choose one word"),
    (["train.name=" + 300 * "a"], f"train.name={40 * 'a'}...: a part of 300 bytes, and file systems take 255; shorten"),
    (["cluster.hostfile=/b/" + 99 * "äöü"], "a part of 594 bytes"),
    (["train.output_dir=/etc/passwd"], "not a folder"),
    (["train.output_dir=s3://bucket/runs"], "a URL, which only data.path takes; give a path"),
    (["model.path=https://huggingface.co/a/b"], "only data.path takes; give a path or a hub name, OWNER/NAME"),
    (["train.early_stopping_patience=2"], "it needs evaluations; set train.eval_every"),
    (["checkpoint.load_best_model_at_end=true"], "checkpoint.load_best_model_at_end=true: it needs evaluations"),
    (["train.epochs=1", "data.streaming=true"], "set train.steps, and train.epochs=0"),
    (["train.hub_model_id=me/mine", "train.export=false"], "set train.export=true"),
    (["train.hub_model_id=https://hub/me/mine"], "write NAME or ORGANISATION/NAME"),
    (["train.sample=x", "train.export=false"], "set train.export=true"),
    (["checkpoint.resume=/nowhere"], "there is no such folder"),
    (["supervise.spike=1"], "choose a value above 1, or 0"),
    (["supervise.spike=20", "supervise.max_skips=0"], "skips no step; set it to 3"),
    (["distill.teacher=a/b"], "set that, or leave teacher out"),
    (["distill.enabled=true"], "set distill.teacher to a folder or a hub name"),
    (["recipe=distill", "data.kind=preference"], "pairs have a loss of their own; set data.kind=text or chat"),
    (["train.preference.beta=0.5"], "unused by data.kind=corpus; set data.kind=preference"),
    (["recipe=distill", "model.chunked_loss=always"], "needs whole logits; set model.chunked_loss=auto"),
    (["recipe=distill", "distill.top_k=0", "distill.tail=false"], "compares the whole vocabulary; set distill.top_k"),
    (["recipe=distill", "model.overrides.output_router_logits=true"], "no part for routers; set it to false"),
    # serving
    (["inference.controller.workers=[{url: localhost, boards: [x]}]"], "give it as in http://127.0.0.1:8001"),
    (["inference.controller.models=[{name: a, url: localhost}]"], "give it as in http://127.0.0.1:8500"),
    (["inference.controller.models=[{url: 'http://x'}]"], "empty, or another model's"),
    (["inference.controller.workers=[{url: http://localhost, cost: x}]"], "give the bubble board of each rank"),
    (["inference.controller.deadline_s=0"], "above 0"),
]


@pytest.mark.parametrize(
    ("settings", "part"), BAD, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else ""
)
def test_bad_settings(settings, part):
    with pytest.raises(ValueError) as error:
        load(settings)
    message = str(error.value)
    assert part in message
    assert "; " in message or "expected" in message, "an error ends with a remedy"


FILES = [
    ("train: {stpes: 7}", "there is no field train.stpes; did you mean train.steps?"),
    ("trian: {steps: 7}", "did you mean train?"),
    ("train: {steps: x}", "train.steps='x': expected an integer"),
    (
        "defaults: [quick, _self_]",
        "there is no quick in recipe; one of distill, dpo, lora, pretrain, qlora, quickstart, serving, sft",
    ),
    ("- a", "holds no fields"),
    ("a: [", "not YAML"),
]


@pytest.mark.parametrize(("text", "part"), FILES)
def test_bad_recipe_files_are_named(text, part, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.yaml") as error:
        load([f"recipe={file}"])
    assert part in str(error.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        load(["cluster.master_addr=", "train.name=a/b", "data.path=x"])
    assert len(str(error.value).splitlines()) == 3


def test_the_world_must_fit_the_pipeline():
    config = WeftConfig()
    config.pipeline.stages = 4
    with pytest.raises(ValueError, match="6 processes are not a multiple of it; change it, or start 8"):
        check_world(config, 6)
    config.train.batch_size = 4
    check_world(config, 4)
    with pytest.raises(ValueError, match="x 2 replicas make 8"):
        check_world(config, 8)


def test_one_stage_adapts_only_with_several_replicas():
    config = WeftConfig()
    config.pipeline.adapt, config.pipeline.schedule = True, ScheduleKind["auto"]
    check_world(config, 2)
    with pytest.raises(ValueError, match=r"pipeline\.adapt=true: one stage on one replica has nothing to adapt"):
        check_world(config, 1)
