"""A teacher whose weights stay on the host scores as one on the device, and takes the memory of single layers."""

import pytest
import torch

from tests.engine.taught import LAYERS, scores, settings
from weft.tools.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_streamed_teacher_scores_as_a_whole_one_in_less_memory(tmp_path):
    found = [run_ranks(1, scores, settings(tmp_path, 512, ahead=ahead))[0] for ahead in (False, True)]
    (whole, whole_bytes, _), (streamed, streamed_bytes, _) = found
    assert streamed == whole and whole[0] == whole[1]
    weights = LAYERS * (4 + 9) * 512**2 * 4
    assert whole_bytes - streamed_bytes > 0.6 * weights, (whole_bytes, streamed_bytes, weights)


@pytest.mark.gpu(shows="a streamed teacher has two layers on the device at a time, and the scores of a whole one")
def test_streamed_teacher_has_two_layers_on_the_device(tmp_path):
    found = [scores(settings(tmp_path, 128, ahead=ahead), "cuda") for ahead in (False, True)]
    (whole, whole_bytes, _), (streamed, rest_bytes, peak_bytes) = found
    assert torch.equal(torch.tensor(streamed), torch.tensor(whole))
    layer = (4 + 9) * 128**2 * 4
    assert rest_bytes < 0.1 * layer < whole_bytes and peak_bytes < 2.6 * layer, (whole_bytes, rest_bytes, peak_bytes)
