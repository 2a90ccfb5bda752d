"""On a CPU, prompts without a LoRA adapter stay as they are in a batch with prompts of one."""

from importlib import import_module

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("plug_in", ["vllm_nixl", "vllm_scheduler"])  # of decode servers, and of workers
@pytest.mark.parametrize("is_prefill", [False, True])
def test_only_tokens_of_an_adapter_get_its_part(is_prefill, plug_in):
    pytest.importorskip("vllm")
    from vllm.lora.punica_wrapper import punica_cpu

    import_module(f"weft.inference.worker.{plug_in}")
    inputs, weights, found = torch.ones(4, 3), torch.ones(1, 1, 2, 3), torch.full((4, 2), 9.0)
    if is_prefill:  # prompts of 1, 2 and 1 tokens
        lengths, adapters = torch.tensor([1, 2, 1]), torch.tensor([0, -1, 0])
        starts = torch.tensor([0, 1, 3])
        punica_cpu.sgmv_shrink(inputs, weights, found, starts, lengths, adapters, 3, 2, 4, 0.5)
    else:
        punica_cpu.bgmv_shrink(inputs, weights, found, torch.tensor([0, -1, -1, 0]), 0.5)
    assert found.tolist() == [[1.5, 1.5], [0.0, 0.0], [0.0, 0.0], [1.5, 1.5]]
    for adapter, part in ((0, 1.5), (-1, 0.0)):  # one prompt of four tokens
        punica_cpu.bgmv_shrink(inputs, weights, found, torch.tensor([adapter]), 0.5)
        assert found.tolist() == [[part, part]] * 4
