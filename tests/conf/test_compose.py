"""Every recipe, group and file composes, and a resolved configuration repeats itself."""

import pytest
import yaml

from tests.interpreter import python
from weft.conf import load
from weft.conf.compose import compose
from weft.conf.fields import FOLDER, choices, groups
from weft.conf.schema import ScheduleKind, WeftConfig
from weft.conf.trees import from_tree, to_tree

RECIPES = {
    "quickstart": [],
    "sft": ["model.path=a/b", "data.path=c/d"],
    "lora": ["model.path=a/b", "data.path=c/d"],
    "qlora": ["model.path=a/b", "data.path=c/d"],
    "distill": ["model.path=a/b", "distill.teacher=c/d", "data.path=e/f"],
    "dpo": ["model.path=a/b", "data.path=c/d"],
    "pretrain": ["model.tokenizer=a/b", "data.path=c/d"],
    "serving": ["inference.prefill.model=a/b"],
}


def test_every_recipe_is_listed_here():
    assert set(choices("recipe")) == set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_passes_the_checks(recipe):
    config = load([f"recipe={recipe}", *RECIPES[recipe]])
    assert config.train.name == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resolved_configuration_repeats_itself(recipe, tmp_path):
    config = load([f"recipe={recipe}", *RECIPES[recipe], "cluster.links=[]", "train.max_seconds=1.5"])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_tree(config)))
    assert load([f"recipe={file}"]) == config
    assert load([], recipe_file=str(file)) == config


def test_a_tree_needs_no_hydra_to_become_a_configuration():
    config = compose(["recipe=quickstart"])
    assert from_tree(to_tree(config), source="test") == config


@pytest.mark.parametrize("option", [f"{group}={name}" for group in groups() for name in choices(group)[1:]])
def test_every_group_option_composes(option):
    assert isinstance(compose([option]), WeftConfig)


def test_every_group_has_options():
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} >= {"recipe", *groups()}


@pytest.mark.parametrize("new", [["recipe=pretrain"], ["recipe=quickstart"], ["model=tiny_llama"]])
def test_the_form_of_a_recipes_new_model_is_not_that_of_a_given_one(new, tmp_path):
    assert compose(new).model.overrides.keys() > {"hidden_size"}
    given = compose([*new, "model.path=a/b", "model.overrides.rope_theta=2"])
    assert given.model.overrides == {"rope_theta": 2}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "a/b", "overrides": {"rope_theta": 2}}}))
    assert compose([f"recipe={file}", "model.path=c/d"]).model.overrides == {"rope_theta": 2}


def test_text_has_letters_of_all_languages():
    given = compose(["train.output_dir=/home/jürgen/läufe", "train.name='ä b'", "data.path=数据.jsonl"])
    assert (given.train.output_dir, given.train.name, given.data.path) == ("/home/jürgen/läufe", "ä b", "数据.jsonl")


@pytest.mark.parametrize(
    "text", ["007", "1e3", "1_000", "1.50", "0x1F", "12:30:45", "2024-11-28", "2024_11_28", "on", "no", "true", "NaN"]
)
def test_text_stays_as_it_is_written(text, tmp_path):
    """In a command and a recipe file; YAML and Hydra read numbers, times, dates and truth values."""
    assert compose([f"train.name={text}"]).train.name == text
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"train: {{name: {text}}}\nmodel: {{lora: {{target_modules: [a, {text}]}}}}\n"
        f"data: {{sources: [{{path: {text}, weight: 1}}]}}\ncluster: {{routes: [[{text}]]}}\n"
    )
    config = compose([f"recipe={file}"])
    assert (config.train.name, config.model.lora.target_modules[1]) == (text, text)
    assert (config.data.sources[0].path, config.cluster.routes) == (text, [[text]])


def test_a_recipe_file_with_a_section_twice_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 7}\noptimizer: {lr: 1}\ntrain:\n  name: a\n")
    with pytest.raises(ValueError, match=r"mine.yaml: cannot be read: line 3: the key train is there twice; leave one"):
        compose([f"recipe={file}"])


def test_nothing_departs_by_default():
    assert compose() == WeftConfig()


def test_yaml_files_hold_departures_only():
    for path in FOLDER.glob("*/*.yaml"):
        if path.parent.name == "recipe":
            assert path.read_text().startswith("# @package _global_\n")
            continue
        kind = groups()[path.parent.name]
        tree = yaml.safe_load(path.read_text())
        assert tree.pop("defaults") == ["schema"], path
        same = [name for name, value in tree.items() if to_tree(getattr(kind(), name)) == value and name != "schedule"]
        assert not same, f"{path} repeats the defaults of {same}"


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_groups():
    assert compose(["recipe=quickstart"]).pipeline.microbatches == 8
    assert compose(["recipe=quickstart", "pipeline.microbatches=5"]).pipeline.microbatches == 5
    config = compose(["recipe=quickstart", "pipeline=w"])
    assert config.pipeline.schedule is ScheduleKind["w"]


def test_a_file_of_the_users_builds_on_a_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [quickstart, _self_]\ntrain: {steps: 7}\n")
    config = compose([f"recipe={file}", "optimizer.lr=0.5"])
    assert (config.pipeline.stages, config.train.steps, config.optimizer.lr) == (4, 7, 0.5)


def test_free_form_mappings_take_new_keys():
    assert compose(["model.overrides.hidden_size=64"]).model.overrides == {"hidden_size": 64}
    assert compose(["model.overrides={hidden_size: 64, eos_token_id: [1, 2]}"]).model.overrides == {
        "hidden_size": 64,
        "eos_token_id": [1, 2],
    }
    assert compose(["model=tiny_llama", "model.overrides={vocab_size: 7}"]).model.overrides["vocab_size"] == 7


def test_neither_torch_nor_hydra_is_loaded_with_the_schema():
    code = (
        "import sys, weft.conf.schema, weft.conf.checks, weft.conf.deepspeed, weft.conf;"
        "assert not {'torch', 'hydra', 'omegaconf'} & set(sys.modules); weft.conf.load(['recipe=quickstart']);"
        "assert 'torch' not in sys.modules"
    )
    python("-c", code, check=True)
