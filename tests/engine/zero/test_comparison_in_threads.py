"""Replicas that compare themselves find a flipped bit wherever it is, name its replica, and find none without."""

import re

import pytest
import torch
from torch.optim import SGD, AdamW

from tests.engine.small_engine import SmallEngine
from tests.thread_ranks import run_in_threads
from weft.conf.schema import ZeroConfig
from weft.engine.zero import Comparison, ReplicasDiffer

KINDS = {"adamw": lambda p: AdamW(p, lr=0.02), "plain": lambda p: SGD(p, lr=0.02)}
EVERY = 2


def compared(made, every=EVERY):
    comparison = Comparison(
        made.sharding,
        made.basic_optimizer,
        every=every,
        replica=made.replica,
        replicas=made.layout.lines_of(made.pipe_rank),
        group=made.replicas,
    )
    made.before_update.append(lambda: comparison.before_update(made.global_steps + 1))
    return comparison


def flip(made, where):
    """Flip a bit of the last weight, or of its state; its name."""
    made.sharding.settle()
    fragment = made.sharding.trained[-1].fragments[-1]
    tensor = {
        "weight": lambda: fragment.parameter.data,
        "state": lambda: made.basic_optimizer.state[fragment.tensor]["exp_avg"],
    }[where]()
    tensor.view(-1)[-1:].view(torch.uint8)[2] ^= 16  # more than an update would round away
    return fragment.name


def trained(stages, zero, kind, flips, steps, saved=0, every=EVERY):
    """Steps until a difference is found: steps done, what was said, the good step, and names of what was flipped.

    Args:
        flips: (step, rank, where) of bits to flip before a step.
        saved: before this step a checkpoint would be written.
        every: steps between comparisons.
    """
    made = SmallEngine(stages, ZeroConfig(stage=zero, reduce_bucket_size=90), KINDS[kind])
    comparison, names = compared(made, every), []
    for step in range(1, steps + 1):
        names += [flip(made, where) for at, rank, where in flips if (at, rank) == (step, made.global_rank)]
        try:
            if step == saved:
                comparison.now(made.global_steps)
            made.step()
            comparison.check()
        except ReplicasDiffer as error:
            assert error.ranks and all(re.search(rf"ranks? [\d, ]*\b{rank}\b", str(error)) for rank in error.ranks)
            return made.global_steps, str(error), error.good_step, names
    comparison.now(made.global_steps)
    return made.global_steps, "", None, names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "stages"), [(2, 1), (3, 1), (4, 2), (1, 1)])
@pytest.mark.parametrize("zero", range(4))
def test_replicas_that_are_alike_are_left_alone(world, stages, zero, kind):
    assert run_in_threads(world, trained, stages, zero, kind, (), 5, 4) == [(5, "", None, [])] * world


@pytest.mark.parametrize(("world", "zero"), [(3, 1), (3, 2), (2, 1)])
def test_what_was_found_is_said_although_the_next_update_has_made_weights_whole(world, zero):
    found = run_in_threads(world, trained, 1, zero, "adamw", [(3, 1, "weight")], 8, 0, 1)
    (name,) = found[1][3]
    for _, text, good_step, _ in found:
        assert f"replicas differ: rank{'s 0,' * (world == 2)} 1 " in text and name in text and good_step == 1


@pytest.mark.parametrize("at", [3, 4, 5, 6])
@pytest.mark.parametrize(
    ("world", "stages", "zero", "where", "rank"),
    [(3, 1, 0, "weight", 1), (3, 1, 0, "state", 2), (3, 1, 2, "weight", 0), (6, 2, 0, "state", 4)],
)
def test_a_flipped_bit_is_found_two_steps_after_the_next_comparison(world, stages, zero, where, rank, at):
    found = run_in_threads(world, trained, stages, zero, "adamw", [(at, rank, where)], 12)
    (name,) = found[rank][3]
    if zero and at % EVERY:
        assert all(each[:3] == (12, "", None) for each in found), "the owner's weights have come over it"
        return
    looked = at + at % EVERY  # the step before whose update replicas are compared next
    done, text, good, _ = found[0]
    assert all(each[:3] == (done, text, good) for each in found)
    assert (done, good) == (looked + 2, looked - 1 - EVERY)
    # From a state that differs weights come to differ, too.
    what = f"the optimiser's state of {name}" if where == "state" else name
    assert re.search(rf"after step {looked - 1}: replicas differ: rank {rank} in [^;]*{re.escape(what)}", text), text
    assert f"equal after step {good}:" in text


@pytest.mark.parametrize("saved", [2, 3, 4, 5])
def test_what_is_about_to_be_saved_is_compared_at_once(saved):
    found = run_in_threads(3, trained, 1, 0, "adamw", [(saved, 1, "weight")], 12, saved)
    done, text, good, _ = found[0]
    assert done == saved - 1
    assert f"after step {done}: replicas differ: rank 1 in " in text
    assert good < done
    assert all(each[:3] == (done, text, good) for each in found)


def test_two_replicas_have_no_majority():
    found = run_in_threads(4, trained, 2, 1, "adamw", [(4, 3, "weight")], 12)
    (name,) = found[3][3]
    assert all(f"ranks 2, 3 do not agree in {name}, and no majority says which of them is wrong" in f[1] for f in found)


def test_many_differences_are_counted():
    """A rank whose weights have all changed is named once, with the first of them."""

    def run():
        made = SmallEngine(1, ZeroConfig(reduce_bucket_size=90), KINDS["plain"])
        comparison = compared(made, every=1)
        made.step()
        if made.global_rank == 2:
            for parameter in made.part.parameters():
                parameter.data.add_(1)
        with pytest.raises(ReplicasDiffer) as caught:
            comparison.now(1)
        return str(caught.value), [name for name, _ in made.part.named_global_parameters()]

    for text, names in run_in_threads(3, run):
        listed = text.split("rank 2 in ")[1].split(" and ")[0].split(", ")
        assert len(listed) == 3 and set(listed) <= set(names)
        assert f" and {len(names) - 3} more. They" in text


def test_steps_taken_back_begin_anew():
    """After a restored checkpoint nothing that was found before counts."""

    def run():
        made = SmallEngine(1, ZeroConfig(reduce_bucket_size=90), KINDS["plain"])
        comparison = compared(made)
        for _ in range(4):
            made.step()
        if made.global_rank == 1:
            flip(made, "weight")
        made.step()
        made.step()  # compared before this one's update
        with torch.no_grad():
            for parameter in made.part.parameters():
                parameter.data.zero_()
        made.global_steps = 2
        for _ in range(4):
            made.step()
            comparison.check()
        comparison.now(made.global_steps)
        assert comparison._good_step == made.global_steps == 6

    run_in_threads(3, run)


def test_nothing_is_compared_by_default():
    def run():
        made = SmallEngine(1, ZeroConfig(), KINDS["plain"])
        comparison = compared(made, every=0)
        for _ in range(3):
            made.step()
            if made.global_rank == 1:
                flip(made, "weight")
            comparison.now(made.global_steps)

    run_in_threads(2, run)


@pytest.mark.parametrize(("every", "flipped", "after"), [(1, 3, 2), (2, 4, 3)])
def test_what_was_found_first_is_said_before_anything_is_saved(every, flipped, after):
    """Weights that are gathered anew have been alike since, and may have been compared again."""

    def run():
        made = SmallEngine(1, ZeroConfig(stage=1, reduce_bucket_size=90), KINDS["adamw"])
        comparison = compared(made, every=every)
        for step in range(1, 5):
            if (step, made.global_rank) == (flipped, 1):
                flip(made, "weight")
            made.step()
        with pytest.raises(ReplicasDiffer, match=f"after step {after}: replicas differ: rank 1 in ") as caught:
            comparison.now(4)
        return caught.value.good_step, caught.value.ranks

    assert run_in_threads(3, run) == [(1, (1,))] * 3


def test_comparing_at_once_after_steps_were_taken_back_begins_anew():
    def run():
        made = SmallEngine(1, ZeroConfig(reduce_bucket_size=90), KINDS["plain"])
        comparison = compared(made)
        for _ in range(3):
            made.step()
        if made.global_rank == 1:
            flip(made, "weight")
        made.step()
        made.step()  # the difference was sent before this step's update, and its comparison is still pending
        with torch.no_grad():
            for parameter in made.part.parameters():
                parameter.data.fill_(0.5)
        comparison.now(2)
        comparison.now(2)
        if made.global_rank == 2:
            flip(made, "weight")
        with pytest.raises(ReplicasDiffer, match="after step 2: replicas differ: rank 2 in ") as caught:
            comparison.now(2)
        return caught.value.good_step

    assert run_in_threads(3, run) == [2] * 3


class InBf16(SmallEngine):
    """Its weights have masters."""

    def make_part(self, tied):
        return super().make_part(tied).to(torch.bfloat16)


@pytest.mark.parametrize("what", ["master", "state", "weight"])
def test_master_weights_and_state_are_compared_at_stage_0(what):
    def run():
        made = InBf16(1, ZeroConfig(reduce_bucket_size=90), KINDS["adamw"])
        comparison = compared(made, every=1)
        made.step()
        made.sharding.settle()
        comparison.now(1)
        fragment = made.sharding.trained[-1].fragments[-1]
        if made.global_rank == 2:
            state = made.basic_optimizer.state[fragment.tensor]
            tensor = {"master": fragment.tensor, "state": state["exp_avg_sq"], "weight": fragment.parameter}[what]
            tensor.data.view(-1)[:1].view(torch.uint8)[0] ^= 1
        with pytest.raises(ReplicasDiffer) as caught:
            comparison.now(1)
        name = fragment.name if what == "weight" else f"the optimiser's state of {fragment.name}"
        return str(caught.value).startswith(f"after step 1: replicas differ: rank 2 in {name}. They were equal")

    assert all(run_in_threads(3, run))
