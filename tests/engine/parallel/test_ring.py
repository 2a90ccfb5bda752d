"""Keys and values round the ring: logits, losses and gradients of one process, and in memory a member's part."""

import copy

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    padding_mask_function,
    sliding_window_causal_mask_function,
)

from tests.engine.parallel.members import FORMS, items_of, micro_batches, require_exact, shared, whole_model
from tests.engine.parallel.test_experts import deepseek
from tests.engine.parallel.test_head_attention import Grouped, saved_bytes, with_heads
from tests.engine.stages.tiny_models import tiny_model
from weft.conf.schema import ContextExchange
from weft.engine.parallel import blocks, ring, zigzag
from weft.engine.parallel.attention import RingAttention, only_earlier
from weft.engine.parallel.axis import Alone, UnshareableError
from weft.engine.parallel.context_exchange import choose_exchange
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.parallel.ring import Ring, Seen
from weft.engine.stages.checking.axis_check import check_axes
from weft.engine.stages.checking.comparison import whole_outcome

SHAPES = [("llama", size, form) for size in (2, 4) for form in FORMS] + [("mistral", 4, "plain")]
SHAPES += [(arch, 2, form) for arch in ("qwen3", "mistral", "phi3", "mixtral") for form in FORMS]


@pytest.mark.parametrize(("arch", "size", "form"), SHAPES)
def test_members_compute_what_one_process_does(arch, size, form):
    """Three micro-batches; Mistral's window is 4."""
    model = with_heads(arch, of_keys=2)
    require_exact(model, micro_batches(3, **FORMS[form]), ContextExchange.ring, context=size)


@pytest.mark.parametrize("form", FORMS)
def test_members_may_share_matrices_as_well(form):
    require_exact(with_heads("llama"), micro_batches(2, **FORMS[form]), ContextExchange.ring, context=2, tensor=2)


def test_values_may_be_of_another_size_than_keys():
    model = whole_model(deepseek(num_hidden_layers=2))
    require_exact(model, micro_batches(2, documents=(6, 10)), ContextExchange.ring, context=2)


@pytest.mark.parametrize("size", [2, 4])
def test_in_bf16_gradients_are_as_near_to_fp32_as_those_of_one_process(size):
    """Whose own error is near 1 %: blocks are merged in fp32, and their gradients rounded once a hop."""
    model, batches = with_heads("llama", layers=4).to(torch.bfloat16), micro_batches(3)
    exact = whole_outcome(copy.deepcopy(model).float(), batches, items_of(batches)).gradients

    def error(found):
        off = sum((found.gradients[name].float() - gradient).square().sum() for name, gradient in exact.items())
        return float(off.sqrt())

    alone = error(whole_outcome(model, batches, items_of(batches)))
    model.zero_grad()
    assert error(shared(model, batches, ContextExchange.ring, context=size)) <= 1.2 * alone


def test_rows_that_see_nothing_are_as_in_one_process():
    """Padded on the left, so that the first positions see padding alone."""
    model = with_heads("llama")
    (batch,) = micro_batches(1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :6] = 0
    batch["labels"][0, :6] = -100
    require_exact(model, [batch], ContextExchange.ring, context=4)


def places(group, length):
    return torch.cat([length // 2 * number + torch.arange(length // 2) for number in group])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("reach", [None, 1, 3, 6, 9, 100])
@pytest.mark.parametrize("earlier", [True, False])
def test_all_that_is_seen_is_computed_and_little_else(size, reach, earlier):
    """Every query meets every key that it sees once; chunks of which nothing is seen are left out."""
    length = 6
    seen = Seen(lambda *_: None, earlier, reach)
    met = torch.zeros(size * length, size * length, dtype=torch.long)
    for index in range(size):
        one = Ring(Alone("context", size, index), 1.0, seen)
        mine = places(zigzag.chunks_of(size, index), length)
        for owner in one.owners():
            theirs = places(zigzag.chunks_of(size, owner), length)
            for part in one.parts(owner, length):
                met[mine[part.rows, None], theirs[part.columns]] += 1
    rows, columns = torch.arange(size * length)[:, None], torch.arange(size * length)
    wanted = (columns <= rows) | (not earlier)
    wanted &= True if reach is None else rows - columns < reach
    assert met.max() == 1 and (met[wanted] == 1).all()
    chunks = wanted.unfold(0, length // 2, length // 2).unfold(1, length // 2, length // 2).any(-1).any(-1)
    computed = met.unfold(0, length // 2, length // 2).unfold(1, length // 2, length // 2).any(-1).any(-1)
    joined = 1.0 if reach is None else 2.0  # of a window's two chunks of keys, what lies between is not left out
    assert computed.sum() <= joined * chunks.sum()


@pytest.mark.parametrize("size", [2, 4])
def test_full_rows_take_one_kernel_a_step_and_equal_work(size):
    pairs = []
    for index in range(size):
        one = Ring(Alone("context", size, index), 1.0)
        parts = [one.parts(owner, 8) for owner in one.owners()]
        assert [len(of_step) for of_step in parts] == [1] * size and parts[0][0].causal
        pairs.append([(part.rows, part.columns) for (part,) in parts[1:]])
    counted = {sum(len(range(8)[rows]) * len(range(8)[columns]) for rows, columns in mine) for mine in pairs}
    assert counted == {(size - 1) * 8 * 4}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("of_keys", [4, 8])
def test_nothing_of_others_is_kept(size, of_keys):
    """Queries, keys, values, output, and a log-sum-exp for each head: of a member's own positions."""
    heads, length, width = 8, 64, 8
    own = length // size
    kept = (2 * heads * width + 2 * of_keys * width + heads) * own * 4
    assert saved_bytes(RingAttention, size, heads, of_keys, length) == kept


def test_masks_are_made_of_chunks_that_meet(monkeypatch):
    """No mask of whole rows exists, and none of a member's rows and all keys."""
    made = []
    block = Ring.block

    def look(self, *given):
        found = block(self, *given)
        made.append(tuple(found.bias.shape))
        return found

    monkeypatch.setattr(ring.Ring, "block", look)
    model, batches = with_heads("llama", layers=1), micro_batches(1, rows=1, documents=(5, 8, 3))
    shared(model, batches, ContextExchange.ring, context=4)
    assert set(made) == {(1, 1, rows, columns) for rows, columns in ((2, 2), (2, 4), (4, 2))}


class Logged:
    """A member's group that notes when shifts start and are waited for, and what it computes between."""

    def __init__(self, group, log):
        self.group, self.log = group, log
        self.axis, self.size, self.index = group.axis, group.size, group.index
        self.number = 0

    def shift(self, tensor):
        handle, number = self.group.shift(tensor), self.number
        self.number += 1
        self.log.append(f"start {number}")
        return Waited(handle, self.log, number)


class Waited:
    def __init__(self, handle, log, number):
        self.handle, self.log, self.number = handle, log, number

    def wait(self):
        self.log.append(f"wait {self.number}")
        return self.handle.wait()


def test_the_next_block_is_on_its_way_while_one_is_computed():
    """In the backward gradients follow a step behind; all members start the same in the same order."""

    def member(axes):
        log = []

        class Kernel(blocks.ProcessorFlash):
            def forward(self, block):
                log.append("forward")
                return super().forward(block)

            def backward(self, *given):
                log.append("backward")
                return super().backward(*given)

        kernels[axes.context.index] = Kernel()
        query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
        one = Ring(Logged(axes.context, log), 0.3)
        query.context_index = axes.context.index
        one.attend(query, key, value).sum().backward()
        return log

    kernels, chosen = {}, blocks.kernel_for
    blocks.kernel_for = lambda query, masked: kernels[query.context_index]
    try:
        logs = run_in_threads({"context": 3}, member)
    finally:
        blocks.kernel_for = chosen
    forward = ["start 0", "forward", "wait 0", "start 1", "forward", "wait 1", "forward"]
    backward = ["start 2", "backward", "start 3", "wait 2", "start 4", "backward", "wait 3", "start 5", "wait 4"]
    backward += ["backward", "wait 5", "start 6", "wait 6"]
    assert logs == [forward + backward] * 3


def test_masks_are_causal_if_one_of_their_parts_is():
    padding = padding_mask_function(torch.ones(2, 4, dtype=torch.bool))
    earlier = [causal_mask_function, sliding_window_causal_mask_function(3)]
    earlier.append(and_masks(earlier[1], padding))
    assert all(map(only_earlier, earlier))
    others = [bidirectional_mask_function, padding, or_masks(causal_mask_function, padding), lambda *_: None]
    assert not any(map(only_earlier, others))


def test_masks_that_show_later_positions_are_computed_in_full():
    """A prefix that all positions see, as in models that read images or prompts both ways."""
    size, length = 2, 16

    def prefix(batch, head, row, column):
        return column < 5

    function = or_masks(causal_mask_function, prefix)
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(1, 2, length, 8, generator=generator) for _ in range(4))
    rows = torch.arange(length)
    want = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    seen = function(0, 0, rows[:, None], rows)
    torch.nn.functional.scaled_dot_product_attention(*want, attn_mask=seen).backward(gradient)

    def member(axes):
        attention = RingAttention(axes.context, "sdpa")
        mask = attention.mask(
            batch_size=1, q_length=length // size, kv_length=length // size, mask_function=function,
            allow_is_causal_skip=False,
        )  # fmt: skip
        mine = [zigzag.take(axes.context, tensor, 2).requires_grad_() for tensor in (query, key, value)]
        output, _ = attention.attend(Grouped(1), *mine, mask)
        output.transpose(1, 2).backward(zigzag.take(axes.context, gradient, 2))
        return [tensor.grad for tensor in mine]

    members = run_in_threads({"context": size}, member)
    for parts, whole in zip(zip(*members, strict=True), want, strict=True):
        torch.testing.assert_close(zigzag.in_order(size, torch.cat(parts, 2), 2), whole.grad)


@pytest.mark.parametrize("packing", [False, True])
def test_an_architecture_that_works_is_found_exact(packing):
    check_axes(tiny_model("qwen3"), context=4, exchange=ContextExchange.ring, packing=packing)


@pytest.mark.parametrize(
    ("arch", "given", "message"),
    [
        ("gemma2", {"attention": "eager"}, "model.attn_implementation=eager cannot merge .* set it to sdpa"),
        ("llama", {"attention": "flash_attention_2"}, "model.attn_implementation=flash_attention_2 cannot merge"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 drops .* set model.overrides.attention_dropout=0"),
    ],
)
def test_what_cannot_be_computed_by_blocks_is_refused(arch, given, message):
    given = dict(given)
    attention = given.pop("attention", "sdpa")
    model = whole_model(tiny_model(arch, num_hidden_layers=1, **given))
    model.config._attn_implementation_internal = attention
    with pytest.raises(UnshareableError, match=f"parallel.context_exchange=ring: {message}"):
        shared(model, micro_batches(1), ContextExchange.ring, context=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, "drops weights of its attention"),
        ({"s_aux": torch.zeros(2)}, "gives its attention s_aux"),
        ({"is_causal": False}, "attends to later positions"),
    ],
)
def test_what_a_module_asks_for_and_blocks_cannot_give_is_refused(arguments, message):
    attention = RingAttention(Alone("context", 2), "sdpa")
    with pytest.raises(UnshareableError, match=rf"ring: Grouped {message}.* set parallel.context_exchange=gather"):
        attention.attend(Grouped(1), *torch.zeros(3, 1, 2, 4, 2), None, **arguments)


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 4, 4), None])
def test_keys_and_masks_of_a_modules_own_making_are_refused(mask):
    attention, keys = RingAttention(Alone("context", 2), "sdpa"), torch.zeros(1, 2, 8 if mask is None else 4, 2)
    with pytest.raises(UnshareableError, match="Grouped makes keys or masks of its own"):
        attention.attend(Grouped(1), torch.zeros(1, 2, 4, 2), keys, keys, mask)


HEADS = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8}


def choice(given, attention_s=0.0, wanted=ContextExchange.auto, fits=lambda _: True):
    """Return the choice of four members and a model with eight heads per key and value head, at a microsecond per
    element."""
    return choose_exchange(
        LlamaConfig(**HEADS, **given),
        wanted,
        context=4,
        tensor=1,
        seconds=lambda _, elements: elements * 1e-6,
        attention_s=attention_s,
        fits=fits,
    )


def test_shifts_that_attention_hides_cost_nothing():
    """A gather takes 2 x 32 elements, shifts 8 each: three forwards, six backwards, and one more."""
    none, why = choice({})
    assert none is ContextExchange.gather
    assert "; a layer and micro-batch: 0.064 ms gathered, 0.08 ms round the ring that attention does not hide" in why
    assert why.endswith("; not all_to_all: parallel.context=4 members cannot have as many of a rank's 2 key and value "
                        "heads each")  # fmt: skip
    found, why = choice({}, attention_s=4 * 8e-6)
    assert found is ContextExchange.ring and "0.008 ms round the ring" in why
    found, why = choice({}, attention_s=4 * 2e-6)  # 3 x (6 + 11) + 8
    assert found is ContextExchange.ring and "0.059 ms round the ring" in why
    found, _ = choice({}, attention_s=4 * 1e-6)  # 3 x (7 + 13.5) + 8
    assert found is ContextExchange.gather


def test_what_costs_least_of_what_fits_is_chosen():
    found, why = choice({}, fits=lambda exchange: exchange is not ContextExchange.gather)
    assert found is ContextExchange.ring and why.endswith("; gather does not fit in memory")
    found, why = choice({}, fits=lambda _: False)
    assert found is ContextExchange.ring and why.endswith("; gather does not fit in memory, nor do others")
    found, _ = choice({"attention_dropout": 0.1}, attention_s=1.0, fits=lambda _: False)
    assert found is ContextExchange.gather, "nothing else can be done: 2 key and value heads are too few for 4 members"


def test_without_costs_what_moves_least_is_chosen_of_what_fits():
    config = LlamaConfig(**HEADS | {"num_key_value_heads": 4})
    for fits, chosen in ((True, ContextExchange.gather), (False, ContextExchange.all_to_all)):
        found, why = choose_exchange(
            config,
            ContextExchange.auto,
            context=4,
            tensor=1,
            fits=lambda exchange, fits=fits: fits or exchange is not ContextExchange.gather,
        )
        assert found is chosen
        assert why.startswith("heads of a whole sequence: 8 gathered, 10 by heads, 13.33 round the ring")


def test_a_given_exchange_is_taken_or_refused_before_the_start():
    found, why = choice({}, wanted=ContextExchange.ring)
    assert found is ContextExchange.ring and why.startswith("given (heads of a whole sequence: 4 gathered, 6.667 round")
    with pytest.raises(UnshareableError, match=r"context_exchange=ring: attention_dropout=0.1 drops weights"):
        choice({"attention_dropout": 0.1}, wanted=ContextExchange.ring)
