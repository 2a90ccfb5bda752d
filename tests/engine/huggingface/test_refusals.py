"""Each refusal of the Trainer's settings has a reason and a remedy."""

import pytest

from weft.engine.huggingface.refusals import _REFUSED, LEAVE_OUT


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, _, text in _REFUSED])
def test_refusal_has_a_reason_and_a_remedy(name, text):
    reason, _, remedy = text.partition("; ")
    assert len(reason.split()) >= 4 and LEAVE_OUT not in reason
    assert remedy
