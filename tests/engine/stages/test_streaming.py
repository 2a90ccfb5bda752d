"""A teacher whose weights stay on the host scores as one on the device, and takes the memory of single layers."""

import errno
import os
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from tests.engine.taught import LAYERS, WORDS, scores, settings
from weft.engine.initialize import check_streamed_teacher
from weft.engine.stages.streaming import StreamedStages
from weft.engine.stages.teacher import Teacher
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


@pytest.mark.gpu(shows="weights that a forward changes are not lost silently")
def test_weights_that_a_forward_changes_are_refused():
    stage = torch.nn.Linear(3, 3).cuda().requires_grad_(False)
    stage.hf_model = BertConfig()
    streamed = StreamedStages(torch.device("cuda"), Path())
    streamed.add(stage)
    next(iter(streamed)).weight.sum()
    with pytest.raises(ValueError, match=r"BertConfig changes its weights in a forward; set inference"):
        for each in streamed:
            each.weight.div_(2)


def test_full_disk_is_named_before_the_first_step(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    teacher = Teacher(settings(tmp_path, 32, ahead=True), WORDS)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*cache: no file for .* MB .*No space left"):
        teacher.load(torch.device("cpu"))


def test_teacher_that_cannot_be_cut_is_refused(tmp_path):
    config = settings(tmp_path, 32, ahead=True)
    check_streamed_teacher(config)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    BertLMHeadModel(BertConfig(vocab_size=WORDS, is_decoder=False, **shape)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"distill\.teacher=.*; set inference\.scores\.enabled=false"):
        check_streamed_teacher(config)
    config.inference.scores.enabled = False
    check_streamed_teacher(config)
