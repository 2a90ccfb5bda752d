"""Arguments of vLLM that do not go with bubbles are named, in every way of writing them."""

import pytest

from weft.inference.worker.arguments import REMEDIES, SHORT, problems_of


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("write", [str, lambda name: name.replace("-", "_"), lambda name: f"{name}=3"])
def test_an_argument_that_weft_sets_or_cannot_have_is_named_with_what_to_do(name, write):
    argument = f"--{write(name)}"
    assert list(problems_of(["--seed", "3", argument])) == [f"{argument}: {REMEDIES[name]}"]


def test_short_ones_too_and_each_of_several():
    assert [text.split(":")[0] for text in problems_of(["-pp", "2", "-tp=2", "--port", "1", "-dp"])] == [
        *("-pp", "-tp=2", "--port", "-dp"),
    ]
    assert set(SHORT.values()) <= REMEDIES.keys()


@pytest.mark.parametrize("argument", ["port", "-port", "--ports", "--seed=port", "host", "--max-num-seqs", "-q", ""])
def test_others_pass(argument):
    assert list(problems_of([argument])) == []
