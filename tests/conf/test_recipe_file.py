"""A recipe of somebody else takes little time and memory, and gets nothing of the user's environment."""

import pytest

from weft.conf import load
from weft.conf.recipe_file import read_recipe

NINE = range(1, 10)


def doubling(reference, first):
    """Fields of which each stands for the one before it twice, 40 times over."""
    lines = [f"  v0: {first}"] + [f"  v{n}: {reference(n - 1)}" for n in range(1, 41)]
    return "model:\n  overrides:\n" + "\n".join(f"  {line}" for line in lines)


BOMBS = {
    "aliases": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "\n".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in NINE),
    "merges": "a0: &a0 {x: 1, y: 2}\n"
    + "\n".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}, <<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 30)),
    "brackets": "[" * 100_000,
    "braces": "{a: " * 100_000,
    "dashes": "- " * 100_000,
    "a long number": "train: {steps: " + "1:" * 250_000 + "1}",
    "text": doubling(lambda n: f'"${{model.overrides.v{n}}}${{model.overrides.v{n}}}"', "xxxxxxxxxx"),
    "relative text": doubling(lambda n: f'"${{.v{n}}}${{.v{n}}}"', "xxxxxxxxxx"),
    "tables": doubling(lambda n: f"{{a: '${{model.overrides.v{n}}}', b: '${{model.overrides.v{n}}}'}}", "{c: 1}"),
    "itself": "train: {name: '${train.name}'}",
    "an alias of itself": "a: &a [*a]",
    "a recipe that builds on itself": "defaults: [_file, _self_]",
    "a reference inside of another": "a: x\ntrain: {name: '${${a}}'}",
}


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_recipe_that_stands_for_much_is_refused_in_one_line(tmp_path, bomb):
    path = write(tmp_path, BOMBS[bomb])
    with pytest.raises(ValueError, match=rf"^recipe={path}: ") as caught:
        load([f"recipe={path}"])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "reading",
    [
        "${oc.env:HF_TOKEN}",
        "run-${oc.env:HF_TOKEN,none}",
        "${ oc.env : 'HF_TOKEN' }",
        '${oc.env:"HF_TOKEN"}',
        "${oc.env:WANDB_API_KEY,''}",
        "${oc.decode:'oc.env'}",
        "${oc.${train.name}:HF_TOKEN}",
        "${oc.env:${oc.env:USER}}",
        '${oc.env:HF_TOKEN,"{"}',
        "${oc.env:WANDB_API_KEY,{a: 1}}",
        "${oc.env:USER,'}'}${oc.env:HF_TOKEN,[{}]}",
    ],
)
def test_a_recipe_file_reads_no_variable_that_may_be_secret(tmp_path, monkeypatch, reading):
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "a secret of the user")
    for text in (f"train:\n  name: >-\n    {reading}\n", f"model:\n  overrides:\n    x: >-\n      {reading}\n"):
        path = write(tmp_path, text)
        with pytest.raises(ValueError, match=r"(may not read the variable|is not supported in a file)") as caught:
            load([f"recipe={path}"])
        assert "a secret" not in str(caught.value)


@pytest.mark.parametrize("form", ['["{}/other@_global_", _self_]', '[{{"{}@_global_": other}}, _self_]'])
def test_a_recipe_file_builds_on_no_file_elsewhere(tmp_path, monkeypatch, form):
    monkeypatch.setenv("HF_TOKEN", "a secret of the user")
    (tmp_path / "other.yaml").write_text("# @package _global_\ntrain: {name: '${oc.env:HF_TOKEN}'}\n")
    path = write(tmp_path, "defaults: " + form.format("/" + "../" * 12 + str(tmp_path).strip("/")))
    with pytest.raises(ValueError, match="defaults: name recipes and groups of Weft"):
        load([f"recipe={path}"])


def test_references_and_harmless_variables_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("MINE", "typed")
    path = write(tmp_path, "train: {name: 'run-${oc.env:USER}-${zero.stage}', steps: 7}\nzero: {stage: 1}\n")
    assert load([f"recipe={path}"]).train.name == "run-me-1"
    assert load(["recipe=quickstart", "train.name=${oc.env:MINE}"]).train.name == "typed"


def test_aliases_and_merges_of_ordinary_size_are_read(tmp_path):
    path = write(tmp_path, "base: &base {a: 1, b: [1, 2]}\nmore:\n  <<: *base\n  c: *base\n")
    assert read_recipe(str(path))["more"] == {"a": 1, "b": [1, 2], "c": {"a": 1, "b": [1, 2]}}
