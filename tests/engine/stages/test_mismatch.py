"""Tests of messages about a forward that does not run with its work shared."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.engine.stages.checking.mismatch import why_not_shared

TINY = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)


class Own(torch.nn.Module):
    """Attention's place is taken by what raises an error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, **_):
        raise self.error


def raised(error):
    model = LlamaForCausalLM(TINY)
    model.model.layers[1].self_attn = Own(error)
    with pytest.raises(type(error)) as caught:
        model(torch.zeros(1, 4, dtype=torch.long))
    return caught.value


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (["tensor"], "combines a rank's part of heads, features or the sequence with all of it"),
        (
            ["context"],
            "a rank's part of the sequence with all of it, outside of the attention that is looked up by name",
        ),
        (["tensor", "expert"], "a rank's part of heads, features or the sequence or of the experts with all of it"),
    ],
)
def test_where_sizes_do_not_go_together_is_named(axes, said):
    text = why_not_shared(raised(RuntimeError("The size of tensor a (2) must match b (4)")), axes)
    assert text.startswith("model.layers.1.self_attn (Own) ") and said in text and "tensor a" not in text


@pytest.mark.parametrize(
    "error", [KeyError("a size"), RuntimeError("no such kernel"), ZeroDivisionError("sizes of 0"), OSError("size")]
)
def test_other_errors_are_quoted(error):
    text = why_not_shared(raised(error), ["tensor", "context"])
    assert text == f"its forward does not run ({type(error).__name__}: {error})"


def test_error_outside_of_a_model_is_quoted():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) + torch.ones(3)
    assert why_not_shared(caught.value, ["context"]).startswith("its forward does not run (RuntimeError: The size of")
