"""Dropout in a tensor group: the same elements of what all members hold, other ones of each member's parts."""

import dataclasses

import pytest
import torch

from tests.engine.parallel.members import micro_batches, whole_model
from tests.engine.stages.tiny_models import tiny_model
from weft.comm.channel import Completed
from weft.conf.schema import Attention, LoraConfig
from weft.engine.models.skeleton import decoder_layers, hf_model
from weft.engine.parallel import tensor

LORA = LoraConfig(enabled=True, rank=4, dropout=0.5, target_modules=["q_proj", "o_proj", "down_proj"])
CONFIG = dataclasses.replace(
    tiny_model("llama", num_key_value_heads=4, attention_dropout=0.5), lora=LORA, attn_implementation=Attention.eager
)


@dataclasses.dataclass(frozen=True)
class Mirror:
    """A member whose others hold what it holds: members run one after the other, each with the generator."""

    index: int
    size: int = 2
    axis: str = "tensor"

    def all_gather(self, shard):
        return Completed(torch.cat([shard] * self.size))

    def reduce_scatter(self, whole):
        return Completed(whole.chunk(self.size)[self.index] * self.size)

    def all_reduce(self, whole):
        return Completed(whole * self.size)

    def maximum(self, whole):
        return Completed(whole)


def masks_of(index, *, train=True, checkpointing=False):
    """Return a member's dropout masks in a forward and, with checkpointing, in the second one, by the module's name."""
    model = whole_model(CONFIG).train(train)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    inner = hf_model(model)  # without peft's wrapper
    tensor.share_layers(inner, Mirror(index), decoder_layers(inner))
    masks: dict[str, list] = {}
    for name, module in model.named_modules():
        if name.endswith("lora_dropout.default"):
            module.register_forward_pre_hook(lambda _, args: (torch.ones_like(args[0]) + 0 * args[0],))
            module.register_forward_hook(
                lambda _, args, out, name=name: masks.setdefault(name, []).append(out.detach() == 0)
            )
        elif name.endswith("self_attn"):  # eager attention answers with the weights after dropout
            module.register_forward_hook(
                lambda _, args, out, name=name: masks.setdefault(name, []).append(out[1].detach() == 0)
            )
    torch.manual_seed(5)
    batch = micro_batches(1)[0]
    loss = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.square().sum()
    if checkpointing:
        loss.backward()
    return masks, torch.get_rng_state()


@pytest.fixture(autouse=True)
def _own_numbers():
    with torch.random.fork_rng(devices=[]):
        yield


def test_members_drop_the_same_of_what_all_hold_and_their_own_of_parts():
    (one, after_one), (other, after_other) = masks_of(0), masks_of(1)
    assert one.keys() == other.keys()
    assert len(one) == 4 * 4  # q_proj, o_proj, down_proj and attention of each layer
    for name in one:
        assert one[name][0].any()
        held_in_full = "q_proj" in name
        assert torch.equal(one[name][0], other[name][0]) == held_in_full, name
    assert torch.equal(after_one, after_other), "members draw other numbers from now on"


def test_no_two_modules_drop_alike():
    """Each layer and block has numbers of its own."""
    masks, _ = masks_of(0)
    same = [masks[name][0] for name in masks if "down_proj" in name]
    assert not any(torch.equal(one, other) for i, one in enumerate(same) for other in same[:i])


def test_checkpointing_drops_the_same_again():
    masks, _ = masks_of(1, checkpointing=True)
    for name, (first, again) in masks.items():
        assert torch.equal(first, again), name


def test_evaluation_leaves_the_generator_alone():
    _, after = masks_of(0, train=False)
    torch.manual_seed(5)
    assert torch.equal(after, torch.get_rng_state())
