"""`weft profile`: layers are timed at their shapes, and a run plans with what it writes."""

import pytest

from weft.pipeline.planner.measured import load_measured
from weft.pipeline.profile import load_pieces
from weft.tools import cli

MODEL = ["model.overrides.vocab_size=64", "model.overrides.num_hidden_layers=4", "data.sequence_length=32"]
QUICK = ["recipe=quickstart", *MODEL, "model.self_check=false"]


@pytest.fixture
def profile(tmp_path, capsys):
    def run(*options):
        code = cli.main(["profile", "--seconds", "0.1", "--no-links", "--out", str(tmp_path / "p.yaml"), *options])
        return code, capsys.readouterr(), tmp_path / "p.yaml"

    return run


def test_each_layer_has_its_costs_and_a_dry_run_takes_them(profile, capsys):
    code, printed, path = profile(*QUICK)
    assert code == 0 and "7" not in printed.out.split("layer")[0]
    stages = load_pieces(path).stages
    assert len(stages) == 4 and stages[1] == stages[2]
    for cost in stages:
        assert min(cost.forward_s, cost.input_s, cost.weight_s, cost.step_s, cost.activation_bytes) > 0
    width, tokens = 128, 2 * 32
    assert [cost.output_bytes for cost in stages] == [4 * width * tokens] * 3 + [0]
    assert load_measured(path).sequence_length == 32
    assert cli.main(["launch", *QUICK, f"pipeline.costs_file={path}", "dry_run=true"]) == 0
    assert f"pipeline.costs_file={path}" in capsys.readouterr().out


def test_kinds_of_layers_are_told_apart(profile):
    moe = ["model.arch=qwen3_moe", "model.overrides.mlp_only_layers=[1]", "model.overrides.num_experts=4"]
    moe += ["model.overrides.moe_intermediate_size=32", "model.overrides.num_experts_per_tok=2"]
    code, _, path = profile(*QUICK, *moe)
    stages = load_pieces(path).stages
    assert code == 0 and stages[1] != stages[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--out", "/no/such/folder/p.yaml"], "--out /no/such/folder/p.yaml"),
        (["model.arch=lama"], "model.arch=lama"),
    ],
)
def test_bad_input_is_one_line(profile, options, said):
    code, printed, _ = profile(*QUICK, *options)
    assert code == 2 and said in printed.err and printed.err.count("\n") == 1
