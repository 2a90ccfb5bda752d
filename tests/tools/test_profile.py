"""`weft profile`: layers are timed at their shapes, and a run plans with what it writes."""

import pytest

from weft.pipeline.costs import LinkCost
from weft.pipeline.profile import load_pieces
from weft.tools import cli, host_collectives

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
    assert cli.main(["launch", *QUICK, f"pipeline.costs_file={path}", "dry_run=true"]) == 0
    assert f"pipeline.costs_file={path}" in capsys.readouterr().out


def test_kinds_of_layers_are_distinguished(profile):
    moe = ["model.arch=qwen3_moe", "model.overrides.mlp_only_layers=[1]", "model.overrides.num_experts=4"]
    moe += ["model.overrides.moe_intermediate_size=32", "model.overrides.num_experts_per_tok=2"]
    code, _, path = profile(*QUICK, *moe)
    stages = load_pieces(path).stages
    assert code == 0 and stages[1] != stages[2]


def test_only_whole_numbers_of_ranks_measure(profile):
    for ranks in ("0", "2.5", "nan", "two", "100"):
        code, printed, path = profile(*QUICK, "--ranks", ranks)
        assert code == 2 and "--ranks" in printed.err and ranks in printed.err and printed.err.count("\n") == 1
        assert not path.exists()


@pytest.mark.parametrize("answer", ["ValueError: no", None])
def test_a_rank_that_fails_costs_the_collectives_only(tmp_path, capsys, monkeypatch, answer):
    answers = {0: None} if answer is None else {0: answer, 1: answer}
    monkeypatch.setattr(host_collectives, "answers_of", lambda *args, **options: answers)
    monkeypatch.setattr("weft.tools.profile._local", lambda stages: LinkCost())
    path = tmp_path / "p.yaml"
    code = cli.main(["profile", *QUICK, "--seconds", "0.1", "--ranks", "2", "--out", str(path)])
    assert code == 1 and len(load_pieces(path).stages) == 4
    assert "rank 0: " + (answer or "it was not done after") in capsys.readouterr().err


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
