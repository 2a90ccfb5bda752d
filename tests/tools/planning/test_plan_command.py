"""`weft plan`: the table, its reasons, what-if questions, recipes, and one line for bad input."""

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from tests.shapes import sizes
from weft.pipeline.planner.measured import load_measured
from weft.tools import cli

EXAMPLES = Path(__file__).parents[3] / "examples"
SITES = """\
sites:
  - {name: east, hosts: 2, gpus_per_host: 4, gpu: A100, price: 1.5, region: us}
  - {name: west, hosts: 2, gpus_per_host: 4, gpu: A40, price: 0.5}
links:
  - {sites: [east, west], latency_ms: 1, bandwidth_mbps: 100000, egress_price: 0.02}
"""
MODEL = {"model_type": "llama"} | sizes(hidden=256, inner=512, layers=12, heads=4, groups=2, words=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("planning")
    (path / "sites.yaml").write_text(SITES)
    (path / "model.json").write_text(json.dumps(MODEL))
    return path


@pytest.fixture
def weft_plan(folder, capsys):
    """Runs the command; returns its exit code, what it printed, and its errors."""

    def run(*options, cluster=SITES, model="model.json"):
        (folder / "sites.yaml").write_text(cluster)
        fixed = ["--cluster", str(folder / "sites.yaml"), "--model", str(folder / model), "--sequence-length", "128"]
        code = cli.main(["plan", *fixed, "--batch-tokens", "8192", "--cache", str(folder / "models.json"), *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_table_says_what_is_best_and_why(weft_plan):
    code, text, _ = weft_plan("--explain", "1")
    assert code == 0
    for part in (
        "PP x DP x TP",
        "best; bound by",
        "proven: no layout of this space is better by more than",
        "not in the space: DP-cells with tensor, context or expert parallelism",
        "optimiser",
    ):
        assert part in text


def test_what_an_open_batch_leaves_out_is_named(weft_plan):
    code, text, _ = weft_plan("--batch-tokens", "0", "--pin", "pipeline.microbatches=2")
    assert code == 0 and "micro-batches of more than 64 sequences" in text


def test_json_has_every_figure(weft_plan):
    code, text, _ = weft_plan("--format", "json")
    found = json.loads(text)
    assert code == 0 and found["parameters"] == 9_181_440
    steps = [one["step_s"] for one in found["plans"]]
    assert steps == sorted(steps) and all(0 < one["memory_share"] <= 0.8 for one in found["plans"])


def test_adapters_take_less_memory_and_time_than_all_weights(weft_plan, folder, capsys):
    pins = ("--pin", "pipeline.stages=2", "--pin", "zero.stage=0", "--format", "json")
    best = [json.loads(weft_plan(*pins, *more)[1])["plans"][0] for more in ((), ("--lora-rank", "4"))]
    assert best[1]["step_s"] < 0.9 * best[0]["step_s"] and best[1]["memory_share"] < 0.8 * best[0]["memory_share"]
    path = folder / "adapters.yaml"
    code, *_ = weft_plan("--lora-rank", "4", "--lora-target", "q_proj", "--write", str(path))
    lora = yaml.safe_load(path.read_text())["model"]["lora"]
    assert code == 0 and lora == {"enabled": True, "rank": 4, "target_modules": ["q_proj"]}
    code, _, error = weft_plan("--lora-target", "q_proj")
    assert code == 2 and "--lora-target q_proj: no adapters are trained; give --lora-rank" in error


def test_json_stays_json_beside_other_answers(weft_plan, folder):
    question = ("--what-if", "gpu A100 price=9")
    code, text, rest = weft_plan("--format", "json", *question, "--marginal", "--write", str(folder / "beside.yaml"))
    assert code == 0 and json.loads(text)["plans"]
    assert "gpu A100 price=9: step" in rest and "hosts x 1.1:" in rest and "wrote" in rest


@pytest.mark.parametrize("placement", ["straight", "site_fold", "fold"])
def test_a_dry_run_of_the_recipe_predicts_the_plans_step(weft_plan, folder, capsys, placement):
    """GPUs of a host share its uplink, in the plan and in the run."""
    recipe = folder / "same.yaml"
    pins = (f"pipeline.placement={placement}", "pipeline.stages=4", "replicas=4", "parallel.tensor=1", "comm.cell=1")
    options = [word for pin in (*pins, "train.microbatch_size=1") for word in ("--pin", pin)]
    narrow = SITES.replace("bandwidth_mbps: 100000", "bandwidth_mbps: 1000")
    code, text, _ = weft_plan("--format", "json", *options, "--write", str(recipe), cluster=narrow)
    best = json.loads(text)["plans"][0]
    assert code == 0 and len(best["sites"]) == 2
    assert cli.main(["launch", f"recipe={recipe}", "dry_run=true"]) == 0
    (step_s,) = re.findall(r"predicted step ([0-9.e-]+) s", capsys.readouterr().out)
    assert float(step_s) == pytest.approx(best["step_s"], rel=0.05)


def test_the_picture_is_written_where_it_is_asked_for(weft_plan, tmp_path):
    path = tmp_path / "plans.png"
    code, text, _ = weft_plan("--format", "png", "--out", str(path))
    assert code == 0 and f"wrote {path}" in text
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]
    for options in (["--format", "png"], ["--out", str(path)]):
        code, _, error = weft_plan(*options)
        assert code == 2 and "--out FILE" in error
    code, _, error = weft_plan("--format", "png", "--out", str(tmp_path / "plans.nosuch"))
    assert code == 2 and "plans.nosuch" in error and list(tmp_path.iterdir()) == [path]


def test_what_if_and_marginal_values(weft_plan):
    questions = ("site east gpus=0", "link east west bandwidth_mbps=1", "gpu A100 price=9")
    pins = ("pipeline.stages=4", "replicas=2", "parallel.tensor=1")
    options = [word for question in questions for word in ("--what-if", question)]
    options += [word for pin in pins for word in ("--pin", pin)]
    code, text, _ = weft_plan(*options, "--marginal")
    assert code == 0
    assert "site east gpus=0: step" in text and "on west" in text and "site east hosts x 1.1:" in text


def test_a_wider_link_gives_no_worse_plan(capsys):
    """Some routes of these sites end in a dead end, because only one site of each continent has links to the other."""
    wider = "link virginia dublin bandwidth_mbps=10000"
    options = ["--cluster", str(EXAMPLES / "five_sites.yaml"), "--model", str(EXAMPLES / "models/llama-70b.json")]
    assert cli.main(["plan", *options, "--what-if", wider]) == 0
    (answer,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(wider)]
    assert "tokens/s +" in answer and "virginia" in answer


@pytest.fixture
def five_sites(capsys):
    """Runs the command on the example of five sites; returns its exit code, what it printed, and its errors."""

    def run(model, *options):
        fixed = ["--cluster", str(EXAMPLES / "five_sites.yaml"), "--model", str(EXAMPLES / f"models/{model}.json")]
        return cli.main(["plan", *fixed, *options]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(("model", "gap"), [("llama-8b", 0.1), ("mixtral-8x7b", 0.1), ("qwen3-32b", 0.6)])
def test_adapters_are_planned_for_replicas_at_several_sites(five_sites, model, gap):
    code, text, error = five_sites(model, "--lora-rank", "8", "--format", "json")
    assert code == 0, error
    assert json.loads(text)["gap"] < gap


def test_replicas_on_routes_of_their_own_are_found_for_a_model_that_needs_many_gpus(five_sites):
    code, text, error = five_sites("llama-70b", "--pin", "cluster.routes=2", "--format", "json")
    assert code == 0, error
    assert len(json.loads(text)["plans"][0]["routes"]) == 2


def test_more_routes_than_sites_that_are_all_linked_are_refused_at_once(five_sites):
    code, _, error = five_sites("llama-70b", "--pin", "cluster.routes=4")
    assert code == 2 and "links: sites with enough GPUs are not neighbours" in error


def test_a_pipeline_over_sites_is_found_where_routes_end_in_dead_ends(folder, capsys):
    text = (EXAMPLES / "five_sites.yaml").read_text()
    assert text.count("latency_ms: 40, bandwidth_mbps: 5000") == 1
    (folder / "wide.yaml").write_text(
        text.replace("latency_ms: 40, bandwidth_mbps: 5000", "latency_ms: 40, bandwidth_mbps: 10000")
    )
    options = ["--cluster", str(folder / "wide.yaml"), "--model", str(EXAMPLES / "models/llama-70b.json")]
    assert cli.main(["plan", *options, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 0.8


def test_a_profile_says_what_share_of_their_peak_gpus_reach(weft_plan, folder):
    file, layers = folder / "profile.yaml", "count: 12, forward_ms: 0.01, input_ms: 0.01, weight_ms: 0.01"
    file.write_text(f"layers: {{{layers}}}\nmeasured: {{gpu: A100, sequence_length: 128, microbatch_size: 1}}")
    code, text, _ = weft_plan("--profile", str(file))
    assert code == 0 and "GPUs at 6% of their peak" in text
    file.write_text(f"layers: {{{layers}}}\nmeasured: {{gpu: H200, sequence_length: 128, microbatch_size: 1}}")
    code, _, error = weft_plan("--profile", str(file))
    assert code == 2 and "measured on H200, and the cluster has A100, A40" in error and error.count("\n") == 1


def test_plan_reads_the_profile_that_weft_profile_writes(tmp_path):
    model = ["model.overrides.vocab_size=64", "model.overrides.num_hidden_layers=4", "data.sequence_length=32"]
    quick = ["--seconds", "0.1", "--no-links", "recipe=quickstart", "model.self_check=false"]
    assert cli.main(["profile", *quick, *model, "--out", str(tmp_path / "p.yaml")]) == 0
    measured = load_measured(tmp_path / "p.yaml")
    assert measured.sequence_length == 32 and len(measured.layers.stages) == 4


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (("parallel.tensor=1", "pipeline.stages=3", "replicas=4"), "3 stages on 3 ranks x 4 replicas"),
        (("parallel.tensor=2", "pipeline.stages=2", "replicas=2"), "2 ranks x 2 replicas x tensor 2"),
        (("parallel.context=2", "parallel.tensor=2", "pipeline.stages=1"), "x context 2 x tensor 2"),
        (("zero.stage=3", "pipeline.recompute=layers", "replicas=2"), "x 2 replicas"),
        (("zero.stage=2", "pipeline.stages=4", "comm.cell=2", "replicas=2"), "4 stages on 4 ranks x 2 replicas"),
        (("pipeline.stages=4", "comm.cell=3", "replicas=4"), "4 stages on 4 ranks x 4 replicas"),
        (("pipeline.placement=site_fold", "pipeline.stages=4", "comm.cell=2", "replicas=2"), "8 stages on 4 ranks x 2"),
        (("pipeline.placement=site_fold", "pipeline.stages=3", "parallel.tensor=1"), "6 stages on 3 ranks"),
        (("pipeline.placement=fold", "pipeline.stages=3", "parallel.tensor=1", "replicas=4"), "6 stages on 3 ranks"),
        (("pipeline.placement=site_interleaved", "pipeline.stages=2", "parallel.tensor=2"), "4 stages on 2 ranks"),
        ((), "predicted step"),
    ],
)
def test_the_recipe_is_what_a_dry_run_takes(weft_plan, folder, capsys, pins, said):
    recipe = folder / "recipe.yaml"
    options = [word for pin in pins for word in ("--pin", pin)]
    assert weft_plan(*options, "--write", str(recipe))[0] == 0
    assert cli.main(["launch", f"recipe={recipe}", "dry_run=true"]) == 0
    text = capsys.readouterr().out
    assert said in text and "predicted step" in text


def test_a_recipe_of_replicas_at_different_sites_is_taken(weft_plan, folder, capsys):
    recipe = folder / "routes.yaml"
    pins = ("cluster.routes=2", "pipeline.stages=2", "replicas=4", "parallel.tensor=1", "train.microbatch_size=1")
    options = [word for pin in pins for word in ("--pin", pin)]
    code, text, _ = weft_plan("--format", "json", *options, "--write", str(recipe))
    best = json.loads(text)["plans"][0]
    assert code == 0 and len(best["routes"]) == 2 and best["wan_bytes"] > 0
    tree = yaml.safe_load(recipe.read_text())
    assert tree["cluster"]["routes"] == best["routes"]
    nothing_measured = f"data.cache_dir={folder / 'cache'}"
    assert cli.main(["launch", f"recipe={recipe}", "dry_run=true", nothing_measured]) == 0
    said = capsys.readouterr().out
    (step_s,) = re.findall(r"predicted step ([0-9.e-]+) s", said)
    assert "2 ranks x 4 replicas on 2 routes" in said and "at sites" in said
    assert float(step_s) == pytest.approx(best["pipeline_s"], rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_recipes_of_any_cluster_pass_a_dry_run(weft_plan, folder, capsys, seed):
    some = random.Random(seed)
    sites = [
        f"  - {{name: s{place}, hosts: {some.randint(1, 4)}, gpus_per_host: {some.choice([1, 2, 3, 4, 8])}, "
        f"gpu: {some.choice(['A100', 'A40', 'H100'])}, price: {some.choice([0, 1, 2.5])}}}"
        for place in range(3)
    ]
    link = f"{{sites: [s0, s1, s2], latency_ms: {some.choice([0, 20])}, bandwidth_mbps: {some.choice([100, 400000])}}}"
    recipe = folder / f"any{seed}.yaml"
    options = ["--write", str(recipe), "--objective", some.choice(["throughput", "cost"])]
    code, _, error = weft_plan(*options, cluster="\n".join(["sites:", *sites, "links:", f"  - {link}", ""]))
    assert code == 0, error
    assert cli.main(["launch", f"recipe={recipe}", "dry_run=true"]) == 0, capsys.readouterr().err


def test_a_recipe_says_how_layers_are_shared(weft_plan, folder, capsys):
    recipe = folder / "shared.yaml"
    pins = ("parallel.tensor=2", "parallel.context=2", "pipeline.stages=2", "replicas=2", "comm.cell=1")
    options = [word for pin in pins for word in ("--pin", pin)]
    assert weft_plan(*options, "--write", str(recipe))[0] == 0
    hosts = [line.split("slots=") for line in recipe.with_suffix(".hostfile").read_text().splitlines()]
    assert sum(int(slots) for _, slots in hosts) == 2 * 2 * 2 * 2
    assert cli.main(["launch", f"recipe={recipe}", "dry_run=true"]) == 0
    assert "2 stages on 2 ranks x 2 replicas x context 2 x tensor 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (("parallel.tensor=2", "comm.cell=2"), "--pin comm.cell=2: the pipelines of a DP-cell take turns"),
        (("parallel.tensor=4", "parallel.expert=6"), "--pin parallel.expert=6: .* choose a multiple of 4, or 1"),
    ],
)
def test_pins_that_no_run_has_together_are_refused(weft_plan, pins, said):
    code, _, error = weft_plan(*(word for pin in pins for word in ("--pin", pin)))
    assert code == 2 and re.search(said, error) and len(error.splitlines()) == 1


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_recipe_says_how_experts_are_shared(weft_plan, folder, capsys, tensor):
    mixtral = {**MODEL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (folder / "mixtral.json").write_text(json.dumps(mixtral))
    recipe = folder / "experts.yaml"
    pins = (f"parallel.tensor={tensor}", "parallel.expert=4", "pipeline.stages=2", "replicas=4")
    options = [word for pin in pins for word in ("--pin", pin)]
    code, _, error = weft_plan(*options, "--write", str(recipe), model="mixtral.json")
    assert code == 0, error
    assert cli.main(["launch", f"recipe={recipe}", "dry_run=true"]) == 0
    assert "expert" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("gpu: A100", "gpu: A1000"), ("sites[0].gpu=A1000", "did you mean A100")),
        (("price: 1.5", "price: -1"), ("sites[0].price=-1", "at least 0")),
        (("hosts: 2", "hosts: two"), ("sites[0].hosts='two'", "whole number")),
        (("name: west", "name: east"), ("sites.name=east", "2 sites")),
        (("sites: [east, west]", "sites: [east, mars]"), ("links[0].sites", "no site mars")),
        (("links:", "lines:"), ("field 'lines' is not known", "links")),
        (("bandwidth_mbps: 100000", "bandwidth_mbps: 0"), ("links[0].bandwidth_mbps=0", "above 0")),
        (("latency_ms: 1", "latency_ms: .nan"), ("links[0].latency_ms=nan", "finite")),
        (("links:\n", "links: []\nx:\n"), ("'x' is not known",)),
        (("name: west", "name: far west"), ("sites[1].name='far west'", "expected a word")),
        (("name: west", "name: null"), ("sites[1].name=None", "expected a word")),
        (("sites:\n", "sites: [{\n"), ("cannot be read",)),
    ],
)
def test_a_wrong_cluster_file_is_one_line(weft_plan, change, parts):
    code, _, error = weft_plan(cluster=SITES.replace(*change, 1))
    assert code == 2 and len(error.splitlines()) == 1
    assert all(part in error for part in parts), error


def test_a_cluster_without_gpus_is_one_line(weft_plan):
    code, _, error = weft_plan(cluster=SITES.replace("hosts: 2", "hosts: 0"))
    assert code == 2 and "no site has a GPU" in error and len(error.splitlines()) == 1


def test_a_site_without_a_link_is_named(weft_plan):
    code, _, error = weft_plan(cluster=SITES.partition("links:")[0])
    assert code == 2 and "site east has no link" in error and "sites: [west, east]" in error


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--max-memory", "0.0001"], ("memory: the model does not fit", "raise --max-memory")),
        (["--max-memory", "2"], ("--max-memory 2",)),
        (["--max-cost-per-hour", "0.1"], ("--max-cost-per-hour", "the cheapest", "raise it")),
        (["--pin", "pipeline.stage=3"], ("did you mean pipeline.stages",)),
        (["--lora-rank", "8", "--lora-target", "foo"], ("LlamaForCausalLM has no module foo", "q_proj")),
        (["--pin", "pipeline.stages=x"], ("pipeline.stages='x'",)),
        (["--batch-tokens", "1000"], ("--batch-tokens 1000", "--sequence-length 128")),
        (["--batch-tokens", "-128"], ("--batch-tokens=-128", "at least 0")),
        (["--batch-tokens", "9" * 20], ("--batch-tokens", "at most")),
        (["--batch-tokens", "0"], ("--pin pipeline.microbatches=N",)),
        (["--sequence-length", "0"], ("--sequence-length=0", "at least 1")),
        (["--tokens", "nan"], ("--tokens='nan'", "finite")),
        (["--pin", "zero.stage=4"], ("zero.stage=4", "0, 1, 2 and 3")),
        (["--pin", "pipeline.placement=folded"], ("pipeline.placement='folded'", "site_fold")),
        (["--rows", "0"], ("--rows=0",)),
        (["--keep-data-in", "mars"], ("--keep-data-in mars", "east, us, west")),
        (["--what-if", "site mars gpus=0"], ("no such site; the cluster has east, west",)),
        (["--what-if", "site east gpus=-1"], ("--what-if site east gpus='-1'", "at least 0")),
        (["--pin", "parallel.tensor=3"], ("--pin parallel.tensor=3", "choose one of 1, 2")),
        (["--explain", "-1"], ("--explain=-1",)),
        (["--write", "/no/such/folder/r.yaml"], ("--write /no/such/folder/r.yaml", "a folder that is there")),
        (["--what-if", "link east west width=3"], ("there is no field 'width'",)),
        (["--explain", "999"], ("--explain 999",)),
        (["--rows", "x"], ("--rows='x'", "expected")),
        (["--sequence-length", "0.5"], ("--sequence-length=0.5", "whole number")),
        (["--max-sites", "two"], ("--max-sites='two'", "expected")),
        (["--max-memory", "most"], ("--max-memory='most'", "expected")),
        (["--objective", "speed"], ("--objective", "'speed'", "throughput")),
        (["--row", "1"], ("--row 1", "weft plan --help")),
    ],
)
def test_a_wrong_request_is_one_line(weft_plan, options, parts):
    code, _, error = weft_plan(*options)
    assert code == 2 and len(error.splitlines()) == 1
    assert all(part in error for part in parts), error


def test_huge_numbers_are_answered_at_once(weft_plan):
    cluster = SITES.replace("hosts: 2", "hosts: 1000000")
    code, text, error = weft_plan("--batch-tokens", str(128 * 2**30), "--pin", "pipeline.stages=2", cluster=cluster)
    assert code == 0, error
    assert "best; bound by" in text


def test_a_model_that_cannot_be_read_is_one_line(weft_plan, folder):
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text('{"model_type": "no such"}')
    for name in ("missing.json", "broken.json", "other.json"):
        code, _, error = weft_plan(model=name)
        assert code == 2 and f"--model {folder / name}" in error and len(error.splitlines()) == 1
