"""Losses do not depend on how the work of layers is shared out."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.parallel.axis_training import axis_config, go_on, go_on_all
from tests.engine.tiny import many_losses, reference_losses, with_costs
from weft.tools.ranks import run_ranks

STEPS = 5
# Keywords of axis_config, and the replicas that four ranks make.
CASES = [
    (2, {"context": 2, "microbatches": 2}),
    (1, {"context": 2, "stages": 2}),
    (1, {"context": 2, "stages": 2, "zero": 1, "schedule": "auto", "checkpointing": True}),
    (2, {"context": 2, "zero": 3, "microbatches": 2}),
    (1, {"context": 2, "exchange": "all_to_all", "stages": 2, "zero": 1, "checkpointing": True}),
    (2, {"context": 2, "exchange": "all_to_all", "zero": 3, "microbatches": 2}),
    (1, {"context": 2, "exchange": "ring", "stages": 2, "zero": 1, "schedule": "auto", "checkpointing": True}),
    (2, {"context": 2, "exchange": "ring", "zero": 3, "microbatches": 2}),
    (1, {"tensor": 2, "stages": 2}),
    (1, {"tensor": 2, "stages": 2, "schedule": "zbv", "bias": True}),
    (1, {"tensor": 2, "stages": 2, "schedule": "dualpipev", "arch": "gpt_neox", "zero": 1}),
    (1, {"tensor": 2, "stages": 2, "schedule": "auto", "arch": "starcoder2", "zero": 2, "checkpointing": True}),
    (1, {"context": 2, "stages": 2, "schedule": "zbv", "bias": True, "zero": 1}),
    (1, {"tensor": 2, "stages": 2, "schedule": "w", "lora": True}),
    (1, {"tensor": 2, "stages": 2, "schedule": "w", "bias": True, "zero": 1, "checkpointing": True}),
    (1, {"context": 2, "stages": 2, "schedule": "dualpipev", "lora": True, "exchange": "ring"}),
    (2, {"tensor": 2, "zero": 1, "microbatches": 2}),
    (2, {"tensor": 2, "zero": 3, "microbatches": 2}),
    (4, {"arch": "mixtral", "expert": 2, "microbatches": 1}),
    (4, {"arch": "mixtral", "expert": 4, "zero": 3, "microbatches": 1}),
    (2, {"arch": "mixtral", "expert": 2, "stages": 2, "zero": 1, "microbatches": 2}),
    (2, {"arch": "mixtral", "expert": 2, "context": 2, "zero": 2, "microbatches": 2}),
    (2, {"arch": "mixtral", "expert": 4, "tensor": 2, "zero": 1, "microbatches": 2}),
    (2, {"arch": "mixtral", "expert": 2, "tensor": 2, "zero": 3, "microbatches": 2, "checkpointing": True}),
    (1, {"arch": "mixtral", "expert": 2, "tensor": 2, "stages": 2}),
]


@cache
def _expected(arch: str = "llama", **kind: bool) -> list[float]:
    """Return the losses of plain Hugging Face; where routers balance, of Weft on one rank: it weighs their loss by
    labels."""
    if arch == "mixtral":
        return run_ranks(1, many_losses, [axis_config(arch)], STEPS)[0][0]
    return run_ranks(1, reference_losses, axis_config(arch, **kind), 1, STEPS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True], ids=["no costs", "known costs"])
def test_losses_are_those_of_one_process(tmp_path, known):
    """Where costs are known strand pairs follow plans, and a pair of other segments than planned is an error."""
    configs = [axis_config(**case) for _, case in CASES]
    configs = [with_costs(config, tmp_path) for config in configs] if known else configs
    for found in run_ranks(4, many_losses, configs, STEPS, timeout_s=400):
        for (_, case), losses in zip(CASES, found, strict=True):
            expected = _expected(**{name: case[name] for name in ("arch", "bias", "lora") if name in case})
            assert losses == pytest.approx(expected, rel=1e-5), case


@pytest.mark.slow
def test_another_layout_goes_on_from_a_checkpoint_and_exports_the_same(tmp_path):
    two = axis_config("mixtral", expert=2, context=2, zero=1, microbatches=2)
    alone = axis_config("mixtral")
    folder = str(tmp_path / "checkpoints")
    expected = run_ranks(4, go_on, two, folder, True, str(tmp_path / "four"), timeout_s=300)[0]
    found = run_ranks(1, go_on, alone, folder, False, str(tmp_path / "one"), timeout_s=300)[0]
    assert found == pytest.approx(expected, rel=1e-5)
    others = (
        {"expert": 4, "zero": 3, "microbatches": 1},
        {"expert": 4, "tensor": 2, "zero": 1, "microbatches": 2},
    )
    reads = [(axis_config("mixtral", **other), folder, False) for other in others]
    for other, back in zip(others, run_ranks(4, go_on_all, reads, timeout_s=240)[0], strict=True):
        assert back == pytest.approx(expected, rel=1e-5), other
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "four")]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(tmp_path):
    """Matrices and sequences that two ranks share, to four, to more stages, and to one process; and back."""
    layouts = {
        "tensor 2": {"tensor": 2, "stages": 2, "zero": 1},
        "tensor 4": {"tensor": 4, "zero": 3},
        "stages 4": {"stages": 4},
        "ring": {"context": 2, "exchange": "ring", "stages": 2, "zero": 1},
    }
    configs = {name: axis_config(**layout) for name, layout in layouts.items()}
    for config in configs.values():
        config.model.overrides["num_key_value_heads"] = 4
    alone = axis_config()
    alone.model.overrides["num_key_value_heads"] = 4
    written = [name for name in configs if name != "tensor 4"]
    folders = {name: str(tmp_path / name) for name in written}

    def run(world, attempts):
        return run_ranks(world, go_on_all, attempts, timeout_s=400)[0]

    expected = dict(zip(written, run(4, [(configs[name], folders[name], True) for name in written]), strict=True))
    # By other processes than those that wrote.
    pairs = [(name, read) for name in written for read in configs if read != name]
    found = dict(zip(pairs, run(4, [(configs[read], folders[name], False) for name, read in pairs]), strict=True))
    assert len(found) == 9
    by_one = run(1, [(alone, folders[name], False) for name in written])
    found |= {(name, "one process"): losses for name, losses in zip(written, by_one, strict=True)}
    for (name, read), losses in found.items():
        assert losses == pytest.approx(expected[name], rel=1e-5), (name, read)


LOW = [
    (2, {"tensor": 2, "microbatches": 2}),
    (1, {"tensor": 2, "stages": 2, "zero": 1}),
    (2, {"context": 2, "zero": 2, "microbatches": 2}),
]


@pytest.mark.slow
def test_bf16_is_as_near_to_fp32_as_plain_bf16_is():
    configs = [axis_config(**case, precision="bf16") for _, case in LOW]
    plain = run_ranks(1, plain_losses, [axis_config().train.seed, *range(5)], STEPS, timeout_s=400)[0]
    (low, high), *_ = plain
    room = max(distance(*pair) for pair in plain)  # of one seed it may be a third of another's
    assert room > 0
    for found in run_ranks(4, many_losses, configs, STEPS, timeout_s=400):
        for (_, case), losses in zip(LOW, found, strict=True):
            assert distance(losses, high) <= 1.5 * room and losses == pytest.approx(low, rel=1e-3), case


def plain_losses(seeds, steps):
    """Return the losses of plain Hugging Face in bf16 and in fp32, by seed."""
    return [[reference_losses(_seeded(seed, low), 1, steps) for low in ("bf16", "fp32")] for seed in seeds]


def _seeded(seed, precision):
    config = axis_config(precision=precision)
    config.train.seed = seed
    return config


def distance(some, others):
    return max(abs(one - other) for one, other in zip(some, others, strict=True))
