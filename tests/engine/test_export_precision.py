"""Master weights of 16-bit runs equal the original ones; exports have the base's type unless `export_dtype` is set."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engine.exports import export_each, given_model
from tests.engine.tiny import tiny_config
from weft.engine.stages.files.loading import build_model
from weft.tools.ranks import run_ranks

CASES = {
    "bf16": {"precision": "bf16", "stages": 4},
    "bf16, replicas": {"precision": "bf16", "zero": 1},
    "bf16, ZeRO-3": {"precision": "bf16", "zero": 3, "stages": 1},
    "bf16, tensor": {"precision": "bf16", "tensor": 2, "zero": 1},
    "bf16, tied": {"precision": "bf16", "kind": "new", "tied": True},
    "fp16": {"precision": "fp16", "stages": 1, "zero": 1},
    "bf16, in memory": {"precision": "bf16", "kind": "memory"},
    "bf16, half of it frozen": {"precision": "bf16", "kind": "frozen", "zero": 1},
    "fp16 asked for": {"precision": "bf16", "dtype": "fp16"},
    "bf16 asked for": {"precision": "fp32", "dtype": "bf16"},
    "trained": {"precision": "bf16", "steps": 1, "zero": 1},
    "adapters": {"precision": "bf16", "kind": "adapters"},
}


STILL = {"precision": "bf16", "steps": 2, "still": True, "layers": 4}
"""An optimiser without decay whose updates are below the precision of fp32."""


def weights_of(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    model = build_model(tiny_config().model, dtype=torch.float32, seed=5)
    model.save_pretrained(folder / "base")
    run_ranks(4, export_each, str(folder / "base"), str(folder), list(CASES.values()), timeout_s=280)
    return {name: folder / str(number) for number, name in enumerate(CASES)}, folder / "base"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_export_of_untrained_weights_is_the_base_bit_for_bit(exported):
    folders, base = exported
    expected = weights_of(base)
    for name, case in CASES.items():
        if case.get("steps") or case.get("kind") in ("new", "adapters"):
            continue
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(case.get("dtype"), torch.float32)
        found = weights_of(folders[name])
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert found[key].dtype == dtype and torch.equal(found[key], value.to(dtype)), (name, key)
        said = json.loads((folders[name] / "config.json").read_text())["dtype"]
        assert f"torch.{said}" == str(dtype), name

    config = tiny_config(tied=True)
    new = build_model(config.model, dtype=torch.float32, seed=config.train.seed).state_dict()
    found = AutoModelForCausalLM.from_pretrained(folders["bf16, tied"]).state_dict()
    assert all(torch.equal(found[name], value) for name, value in new.items())

    trained = weights_of(folders["trained"])
    assert all(value.dtype == torch.float32 and not torch.equal(value, expected[key]) for key, value in trained.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in trained.values())

    model = given_model(str(base), "adapters")
    model.save_pretrained(base.parent / "theirs")
    ours, theirs = (
        load_file(each / "adapter_model.safetensors") for each in (folders["adapters"], base.parent / "theirs")
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_training_in_bf16_with_invisible_updates_exports_the_given_model_bit_for_bit(stages, replicas, tied, tmp_path):
    model = build_model(tiny_config(tied=tied, layers=4).model, dtype=torch.float32, seed=5)
    model.save_pretrained(tmp_path / "base")
    cases = [STILL | {"stages": stages, "zero": zero, "tied": tied} for zero in range(4)]
    cases.append(cases[1] | {"resumes": True})
    cases.append(cases[2] | {"kind": "memory"})
    run_ranks(stages * replicas, export_each, str(tmp_path / "base"), str(tmp_path), cases, timeout_s=280)
    expected = weights_of(tmp_path / "base")
    for number, case in enumerate(cases):
        found = weights_of(tmp_path / str(number))
        assert found.keys() == expected.keys(), case
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), (case, name)
