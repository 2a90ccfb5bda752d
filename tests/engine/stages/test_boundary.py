"""Tests of tensors that cross the cuts of a model besides one hidden state."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from tests.engine.stages.small_configs import small_config
from tests.engine.stages.tiny import batch, gradients, logits, run, stages_of, tiny, whole
from weft.conf.schema import ModelConfig, Recompute, SplitKind
from weft.engine.models.recomputation import recompute
from weft.engine.models.skeleton import Placeholder, cuttable_layers, decoder_layers, model_class, num_layers, skeleton
from weft.engine.stages.checking.comparison import run_stages
from weft.engine.stages.checking.self_check import self_check
from weft.engine.stages.cutting.boundary import BoundaryTracer, boundaries, pack, packed_size, unpack
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.outline import outline_of
from weft.engine.stages.cutting.placeholders import SkippedLayer, Upstream
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.provenance import BEFORE, Provenance
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.files.loading import load_hf_config

ZAYA = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96, "pad_token_id": 0}


def zaya(**overrides) -> ModelConfig:
    return ModelConfig(arch="zaya", overrides={**ZAYA, **overrides})


class TestJoining:
    PARTS = (
        torch.randn(2, 3, 4).bfloat16(),
        torch.randn(5),
        torch.arange(7),
        torch.tensor([True, False, True]),
        torch.randn(1, 3).bfloat16(),
    )

    def test_bit_for_bit(self):
        packed = pack(self.PARTS, torch.bfloat16)
        forms = [(part.shape, part.dtype) for part in self.PARTS]
        assert (packed.dtype, packed.shape) == (torch.bfloat16, (packed_size(forms, torch.bfloat16),))
        assert all(torch.equal(a, b) for a, b in zip(unpack(packed, forms), self.PARTS, strict=True))

    def test_gradients(self):
        given = [part.clone().requires_grad_() if part.is_floating_point() else part for part in self.PARTS]
        sent = pack(given, torch.bfloat16)
        received = sent.detach().requires_grad_()
        parts = unpack(received, [(part.shape, part.dtype) for part in given])
        assert [part.requires_grad for part in parts] == [True, True, False, False, True]
        (parts[0].float().sum() * 3 + (parts[1] * 0.1).sum()).backward()  # the last is not used
        sent.backward(received.grad)
        assert torch.equal(given[0].grad, torch.full_like(given[0], 3))
        assert torch.equal(given[1].grad, torch.full_like(given[1], 0.1))
        assert torch.equal(given[4].grad, torch.zeros_like(given[4]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, hidden, mask, table, more=None):
        table.setdefault("kept", (hidden @ self.weight, 1))
        return hidden @ self.weight + mask, hidden[..., :2].long()


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids):
        hidden, more, table = self.embed(ids) * self.scale, None, {}
        mask = torch.zeros_like(hidden) + ids[..., None]
        for layer in self.layers:
            hidden, more = layer(hidden, mask, table, more=more)
        return hidden


class TestProvenance:
    def taken(self):
        model = Toy()
        provenance = Provenance(model, model.layers)
        with provenance.watching():
            model(torch.ones(2, 3, dtype=torch.long))
        return model, provenance

    def test_what_was_made_where(self):
        """Not masks, though they are made with the shape of something that weights went into."""
        found = [(take.layer, take.entry, take.place, take.maker) for take in self.taken()[1].taken]
        kept = ((2, "kept"), (0,), 0)
        assert found == [
            (0, (0,), (), BEFORE),
            (1, (0,), (), 0),
            (1, *kept),
            (1, ("more",), (), 0),
            (2, (0,), (), 1),
            (2, *kept),
            (2, ("more",), (), 1),
        ]

    def test_cuts(self):
        """Each tensor crosses once, with all the places that it goes to; what is made behind a cut does not."""
        _, first, second = boundaries(self.taken()[1].taken, 3)
        assert [[(slot.layer, slot.entry) for slot in part.slots] for part in first] == [
            [(1, (0,))],
            [(1, (2, "kept")), (2, (2, "kept"))],
            [(1, ("more",))],
        ]
        assert [part.slots[0].entry for part in second] == [(0,), (2, "kept"), ("more",)]
        assert (second[2].shape, second[2].dtype) == ((2, 3, 2), torch.int64)

    def test_when_weights_are_used(self):
        model, provenance = self.taken()
        assert provenance.uses[model.scale.untyped_storage()._cdata] == {BEFORE}


class TestPort:
    def test_arguments_are_replaced_and_tables_written_into(self):
        """A middle stage's received tensors go to its own layer, or on."""
        model = Toy()
        provenance = Provenance(model, model.layers)
        with provenance.watching():
            model(torch.ones(2, 3, dtype=torch.long))

        class Known(BoundaryTracer):
            def boundary(self, cut, shape, dtype):
                return boundaries(provenance.taken, 3)[cut]

        port = Port(range(1, 2), 3, Known(LlamaForCausalLM, LlamaForCausalLM.config_class(), "layers"))
        tensors = [torch.full(part.shape, 7).to(part.dtype) for part in port.tracer.boundary(1, (2, 3), None)]
        port.open(tensors, (2, 3), torch.float32)
        table: dict = {}
        args, kwargs = port.put_in(1, (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), table), {"more": None})
        assert args[0] is tensors[0] and args[2] is table and kwargs["more"] is tensors[2]
        assert table["kept"][0] is tensors[1]


def test_what_crosses_the_cuts_of_gemma4():
    """Embeddings for each later layer, and the last keys and values of each kind, once they are made."""
    hf_config = load_hf_config(tiny("gemma4_text"))
    cls = model_class(hf_config)
    assert {name.partition(".")[0] for name in outline_of(cls, hf_config).more} == {"1", "shared_kv_states"}
    tracer = BoundaryTracer(cls, hf_config, decoder_layers(skeleton(cls, hf_config)))
    crossing = [tracer.boundary(cut, (2, 10), torch.bfloat16) for cut in range(1, 6)]
    per_layer = [sum(part.slots[0].entry == (1,) for part in parts) for parts in crossing]
    shared = [sum(part.slots[0].entry[0] == "shared_kv_states" for part in parts) for parts in crossing]
    assert (per_layer, shared) == ([5, 4, 3, 2, 1], [0, 2, 4, 4, 4])
    assert all(part.dtype is torch.bfloat16 for parts in crossing for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [zaya(), tiny("gemma4_text")], ids=["zaya", "gemma4"])
def test_spec_of_what_is_sent(config, dtype):
    """Zaya keeps its hidden state in fp32 while the model is in bf16."""
    stages = stages_of(config, 3, dtype=dtype)
    data, hidden = batch(), None
    for sender, receiver in pairwise(stages):
        hidden = sender(hidden, data)
        spec = (hidden.shape, hidden.dtype)
        assert spec == receiver.hidden_spec(data) == sender.hidden_spec(data, leaving=True)


def test_checkpointed_layers_get_the_same_again():
    config = tiny("gemma4_text")
    want, got = stages_of(config, 3), stages_of(config, 3)
    for stage in got:
        recompute(stage.hf_model, Recompute.layers)
    for stages in (want, got):
        run(stages, batch()).backward()
    assert all(torch.equal(gradients(got)[name], gradient) for name, gradient in gradients(want).items())


def test_stages_that_carry_more_can_be_copied_and_pickled():
    config, data = tiny("gemma4_text"), batch()
    first, last = pickle.loads(pickle.dumps(stages_of(config, 2)))
    assert torch.equal(run(copy.deepcopy([first, last]), data), whole(config)(**data, use_cache=False).loss)


def test_weights_beside_the_layers():
    """They go with the stage where they are used."""
    outline = outline_of(model_class(load_hf_config(zaya())), load_hf_config(zaya()))
    own = {"model.input_hidden_states_scale", "model.input_hidden_states_bias"}
    assert set(outline.own_before) == own and not outline.own_after
    held = [own & {name for name, _ in stage.named_global_parameters()} for stage in stages_of(zaya(), 2)]
    assert held == [own, set()]
    self_check(whole(zaya()), num_stages=2)


class Scaling(LlamaModel):
    """A weight of its own that is used between the layers."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))
        self.layers[0].register_forward_hook(lambda module, args, output: output * self.scale)
        self.post_init()


class Repeating(LlamaModel):
    """Runs its layers twice."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        once = super().forward(input_ids, **kwargs)
        return super().forward(inputs_embeds=once.last_hidden_state, **kwargs)


@pytest.mark.parametrize(
    ("inner", "message"),
    [(Scaling, "Scaling uses its weight scale among its layers"), (Repeating, "its 2 layers run 4 times")],
)
def test_refuses_what_is_no_pipeline(inner, message):
    class ForCausalLM(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = inner(config)
            self.post_init()

    with pytest.raises(ValueError, match=message):
        outline_of(ForCausalLM, load_hf_config(tiny("llama")))


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("zamba", "layers 4 and 1 of ZambaForCausalLM share the weight"),
        ("xlm", "parts of its layers in several lists, attentions, layer_norm1"),
        ("hrm_text", "has no list of 128 decoder layers"),
    ],
)
def test_refuses_ambiguous_layers(arch, message):
    config = small_config(arch)
    with pytest.raises(ValueError, match=message):
        cuttable_layers(skeleton(model_class(config), config))


class TestPlaceholders:
    def test_show_what_they_stand_for_without_its_memory(self):
        layer = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        placeholder = SkippedLayer(Placeholder(layer), None)
        weight = getattr(placeholder, "0").weight
        assert weight.is_meta and weight.shape == (4, 3) and not list(placeholder.parameters())
        with pytest.raises(AttributeError):
            _ = placeholder.nothing

    def test_upstream_answers_in_the_real_form(self):
        class Embedding(nn.Embedding):
            def forward(self, size, ids=None):
                return super().forward(torch.arange(size[1], device=self.weight.device)), ids

        port = Port()
        upstream = Upstream(Embedding(8, 4), port)
        port.open([torch.randn(2, 3, 5)], (2, 3), torch.bfloat16)
        table, ids = upstream(torch.Size([2, 3]), ids=torch.ones(2, 3, dtype=torch.long))
        assert torch.equal(table, torch.zeros(3, 4).bfloat16()) and ids.dtype is torch.int64
        assert upstream.weight.shape == (8, 4) and upstream.weight.untyped_storage().nbytes() == 2

    def test_upstream_tells_equal_numbers_of_different_types_apart(self):
        class Scale(nn.Module):
            def forward(self, ids, factor):
                return ids * factor

        port = Port()
        upstream = Upstream(Scale(), port)
        port.open([torch.randn(2, 3, 5)], (2, 3), torch.float32)
        ids = torch.ones(2, 3, dtype=torch.long)
        found = [upstream(ids, factor).dtype for factor in (1, 1.0, True)]
        assert found == [torch.int64, torch.float32, torch.int64]


def test_layers_that_do_not_run():
    """The layers of a model for pictures that process a picture."""
    config = ModelConfig(
        arch="mllama",
        overrides={},
    )
    text = load_hf_config(config)
    for name, value in {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 96}.items():
        setattr(text, name, value)
    text.num_hidden_layers, text.num_key_value_heads, text.cross_attention_layers = 4, 2, [1, 3]
    text.pad_token_id = text.bos_token_id = text.eos_token_id = 0
    self_check(text)


def test_evaluation_that_rescales():
    """RWKV halves its hidden state after some layers, in evaluation: on one of the two stages only."""
    self_check(small_config("rwkv"))


def test_layers_of_two_attention_blocks():
    config = small_config("longcat_flash")
    assert (num_layers(config), config.num_hidden_layers) == (2, 4)


def test_nothing_is_handed_over_twice():
    """The last stage's logits are the whole model's, whatever else came along."""
    config, data = tiny("gemma4_text"), batch()
    with torch.no_grad():
        want = whole(config)(**data, use_cache=False).logits
        assert torch.equal(logits(stages_of(config, 6), data), want)
        assert run_stages(stages_of(config, 6)[:-1], data).dim() == 1


@pytest.mark.parametrize("arch", ["gemma4_text", "llama"])
def test_reentrant_checkpointing_gives_the_gradients_of_plain_training(arch):
    """As torch has it, it would hide parameters, and all tensors but a layer's own positional arguments."""
    data, found = batch(), []
    for reentrant in (None, True):
        model = whole(tiny(arch))
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.get_input_embeddings().requires_grad_(reentrant is None)
        stages = stages_from_model(model, split_layers(model.config, 2, SplitKind.even), range(2))
        for stage in stages:
            stage.train()
        run(stages, data, torch.tensor(40.0)).backward()
        found.append(gradients(stages))
    plain, checkpointed = found
    assert checkpointed.keys() < plain.keys()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in checkpointed.items())
