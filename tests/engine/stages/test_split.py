"""How layers are shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.stages.tiny import tiny
from weft.conf.schema import SplitKind
from weft.engine.models.sizes import model_sizes
from weft.engine.stages.cutting.split import StageSplit, split_layers
from weft.engine.stages.files.loading import load_hf_config


def config(layers=4, **overrides):
    return load_hf_config(tiny("llama", num_hidden_layers=layers, **overrides))


@given(st.integers(1, 12), st.integers(0, 12))
def test_even(num_stages, extra):
    hf_config = config()
    hf_config.num_hidden_layers = num_stages + extra
    split = split_layers(hf_config, num_stages, SplitKind.even)
    counts = [len(layers) for layers in split.layers]
    assert sum(counts) == num_stages + extra == split.num_layers and len(counts) == num_stages == split.num_stages
    assert max(counts) - min(counts) <= 1


def test_even_spares_the_ends():
    assert [len(r) for r in split_layers(config(6), 4, SplitKind.even).layers] == [1, 2, 2, 1]


def test_cost_spares_the_stage_with_the_head():
    split = split_layers(config(8, vocab_size=2000), 4, SplitKind.cost)
    counts = [len(layers) for layers in split.layers]
    assert counts[-1] == 1 and sum(counts) == 8 and max(counts) <= 3


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("vocabulary", [96, 600, 5000])
def test_cost_is_the_best_of_all_splits(num_stages, vocabulary):
    hf_config = config(7, vocab_size=vocabulary)
    sizes = model_sizes(hf_config)

    def dearest(split):
        costs = [sum(sizes.layers[i].active for i in layers) for layers in split.layers]
        costs[-1] += sizes.after.active
        return max(costs)

    def all_counts(stages, layers):
        if stages == 1:
            yield (layers,)
            return
        for first in range(1, layers - stages + 2):
            for rest in all_counts(stages - 1, layers - first):
                yield (first, *rest)

    best = min(dearest(StageSplit(tuple(counts))) for counts in all_counts(num_stages, 7))
    assert dearest(split_layers(hf_config, num_stages, SplitKind.cost)) == best


def test_given():
    assert split_layers(config(), 3, SplitKind.cost, [1, 2, 1]).layers == (range(0, 1), range(1, 3), range(3, 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2, 2], r"pipeline.layers=\[2,2\]: 2 counts for 3 virtual stages"),
        ([2, 2, 2], "sums to 6, but the model has 4 layers"),
        ([4, 0, 0], "at least one layer"),
    ],
)
def test_given_wrongly(given, message):
    with pytest.raises(ValueError, match=message):
        split_layers(config(), 3, SplitKind.even, given)


def test_sizes_of_a_mixture_of_experts():
    sizes = model_sizes(load_hf_config(tiny("mixtral", num_local_experts=4, num_experts_per_tok=1)))
    layer = sizes.layers[0]
    experts = 4 * 3 * 32 * 48
    assert layer.parameters - layer.active == experts * 3 // 4
    assert sizes.after.parameters == 96 * 32 == sizes.after.active
    assert sizes.before.active == 0
