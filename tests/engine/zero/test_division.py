"""Which buckets and blocks a stage is divided into."""

import pytest
import torch
from torch import nn

from weft.conf.schema import ZeroConfig
from weft.engine.parallel.cut import Cut
from weft.engine.zero import Collectives, Sharding
from weft.engine.zero.division import divide, outside_blocks


class TiedStage(nn.Module):
    """An embedding that is tied to the head, and two blocks between them."""

    index = 0
    tied: frozenset[str] = frozenset()
    cuts = {}

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def named_global_parameters(self):
        yield from self.named_parameters()

    def blocks(self):
        return [*self.layers, self.head]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bucket_size", [1, 20, 45, 1000])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_buckets(stage, bucket_size, replicas):
    """Every parameter keeps its values and lies in one bucket; fragments of all replicas make it whole once."""
    module = TiedStage()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    zero = ZeroConfig(stage=stage, reduce_bucket_size=bucket_size)
    found: dict[str, dict[int, torch.Tensor]] = {}
    for replica in range(replicas):
        copy = TiedStage()
        copy.load_state_dict(module.state_dict())
        buckets = divide([copy], zero, Collectives(replica=replica, num_replicas=replicas), {}, {})
        members = [member.name for bucket in buckets for member in bucket.members]
        assert sorted(members) == sorted(before)
        for bucket in buckets:
            assert len(bucket.members) == 1 or sum(m.parameter.numel() for m in bucket.members) <= bucket_size
            for fragment in bucket.fragments:
                assert fragment.shared is (stage == 0)
                found.setdefault(fragment.name, {})[fragment.start] = fragment.tensor.flatten()
    for name, parts in found.items():
        assert torch.equal(torch.cat([parts[start] for start in sorted(parts)]), before[name].flatten())


def test_what_is_tied_to_a_block_lies_outside_of_it():
    module = TiedStage()
    assert outside_blocks(module) == {module.embed.weight}
    (first, *_) = divide([module], ZeroConfig(stage=3), Collectives(), {}, {})
    assert [member.name for member in first.members] == ["embed.weight"]


def test_buckets_end_where_the_plan_says():
    module = TiedStage()  # 40 elements of embedding and head, then twice 16 + 4
    ends = {0: (0.5, 0.75)}
    for stage, names in ((1, ["embed", "layers.0", "layers.1"]), (3, ["embed", "layers.0", "layers.1"])):
        buckets = divide([module], ZeroConfig(stage=stage), Collectives(num_replicas=2), {}, ends)
        assert [sorted({m.name.rsplit(".", 1)[0] for m in bucket.members}) for bucket in buckets] == [
            [n] for n in names
        ]


def test_what_stays_whole_at_stage_3():
    module = TiedStage()
    zero = ZeroConfig(stage=3, param_persistence_threshold=20, model_persistence_threshold=36)
    buckets = divide([module], zero, Collectives(num_replicas=2), {}, {})
    found = [(bucket.sharded, [member.name for member in bucket.members]) for bucket in buckets]
    assert found == [
        (False, ["layers.0.weight", "layers.0.bias", "layers.1.weight"]),
        (True, ["embed.weight"]),
        (True, ["layers.1.bias"]),
    ]


@pytest.mark.parametrize("stage", range(4))
def test_every_fragment_has_elements_but_that_of_a_parameter_without_any(stage):
    """Which the first replica steps, and all where each steps everything."""
    whole, owners = {}, {}
    for replica in range(3):
        module = TiedStage()
        module.layers[0].register_parameter("none", nn.Parameter(torch.zeros(0, 4)))
        whole = {name: p.numel() for name, p in module.named_parameters()}
        zero = ZeroConfig(stage=stage, reduce_bucket_size=30)
        for bucket in divide([module], zero, Collectives(replica=replica, num_replicas=3), {}, {}):
            for fragment in bucket.fragments:
                assert fragment.tensor.numel() or whole[fragment.name] == 0
                assert 0 <= fragment.start <= whole[fragment.name] - fragment.tensor.numel()
                assert fragment.is_whole == (fragment.tensor.numel() == whole[fragment.name])
                if fragment.is_whole:
                    assert fragment.tensor.shape == fragment.parameter.shape == fragment.shape
                owners.setdefault(fragment.name, []).append(replica)
    assert owners.keys() == whole.keys()
    assert owners["layers.0.none"] == ([0, 1, 2] if stage == 0 else [0])


def test_the_fragment_of_a_part_has_the_shape_of_the_whole_parameter():
    module = TiedStage()
    module.cuts = {"layers.0.weight": Cut((8, 4), 0, 1, 2)}
    buckets = divide([module], ZeroConfig(), Collectives(num_replicas=2), {}, {})
    found = {fragment.name: fragment for bucket in buckets for fragment in bucket.fragments}
    assert found["layers.0.weight"].cut == Cut((8, 4), 0, 1, 2)
    assert found["layers.0.weight"].shape == (8, 4)
    assert found["layers.0.bias"].shape == (4,) and found["layers.0.bias"].cut is None
    (of_part,) = [b for b in buckets if "layers.0.weight" in {m.name for m in b.members}]
    assert len(of_part.members) == 1, "what is summed over other ranks lies in a bucket of its own"


@pytest.mark.parametrize(
    ("threshold", "room", "whole"),
    [
        (4, 100, []),
        (5, 100, ["layers.0.bias", "layers.1.bias"]),
        (16, 100, ["layers.0.bias", "layers.1.bias"]),
        (17, 39, ["layers.0.weight", "layers.0.bias", "layers.1.weight"]),
        (17, 40, ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]),
        (41, 39, ["layers.0.weight", "layers.0.bias", "layers.1.weight"]),
        (41, 40, ["embed.weight"]),
    ],
)
def test_parameters_below_the_threshold_stay_whole_as_long_as_there_is_room(threshold, room, whole):
    module = TiedStage()  # 40 elements of embedding and head, then twice 16 + 4
    zero = ZeroConfig(stage=3, param_persistence_threshold=threshold, model_persistence_threshold=room)
    buckets = divide([module], zero, Collectives(num_replicas=2), {}, {})
    assert [member.name for bucket in buckets if not bucket.sharded for member in bucket.members] == whole


@pytest.mark.parametrize("stage", range(3))
def test_only_stage_3_has_parameters_that_stay_whole(stage):
    module = TiedStage()
    module.layers[1].register_parameter("single", nn.Parameter(torch.ones(1)))
    zero = ZeroConfig(stage=stage, param_persistence_threshold=100, model_persistence_threshold=100)
    (bucket,) = divide([module], zero, Collectives(num_replicas=2), {}, {})
    assert "layers.1.single" in {member.name for member in bucket.members}


@pytest.mark.parametrize(("half", "first"), [(-0.5, 1), (0.5, 2)])
def test_a_cut_lies_before_or_behind_the_middle_of_a_parameter_and_tied_ones_take_no_place(half, first):
    module = TiedStage()
    module.tied = frozenset({"embed.weight"})
    middle = 16 + 4 / 2  # of the first block's vector, among 40 elements
    buckets = divide([module], ZeroConfig(stage=1), Collectives(num_replicas=2), {}, {0: ((middle + half) / 40,)})
    names = [[member.name for member in bucket.members] for bucket in buckets]
    own = [name for name, _ in module.named_parameters() if name != "embed.weight"]
    assert names == [["embed.weight"], own[:first], own[first:]]


@pytest.mark.parametrize("setting", ["reduce_bucket_size", "allgather_bucket_size"])
@pytest.mark.parametrize("limit", [1, 15, 16, 19, 20, 21, 40, 59, 60, 79, 80])
def test_a_bucket_takes_in_what_fits_up_to_its_last_element(limit, setting):
    """Parameters in order, each into the open bucket if that has space: compared with the plain loop over sizes."""
    module = TiedStage()
    expected, filled = [], limit + 1
    for name, parameter in module.named_parameters():
        if filled + parameter.numel() > limit:
            expected.append([])
            filled = 0
        expected[-1].append(name)
        filled += parameter.numel()
    buckets = divide([module], ZeroConfig(stage=1, **{setting: limit}), Collectives(), {}, {})
    assert [[member.name for member in bucket.members] for bucket in buckets] == expected


@pytest.mark.parametrize(("room", "whole"), [(3, 0), (7, 1), (8, 2), (11, 2), (12, 3), (15, 3), (16, 4), (100, 4)])
def test_the_stages_of_a_rank_share_the_room_for_what_stays_whole(room, whole):
    stages = [TiedStage(), TiedStage()]
    stages[1].index = 1
    zero = ZeroConfig(stage=3, param_persistence_threshold=5, model_persistence_threshold=room)
    buckets = divide(stages, zero, Collectives(num_replicas=2), {}, {})
    kept = [(*bucket.stages, member.name) for bucket in buckets if not bucket.sharded for member in bucket.members]
    vectors = [(index, f"layers.{layer}.bias") for index in range(2) for layer in range(2)]
    assert kept == vectors[:whole]


@pytest.mark.parametrize("stage", range(4))
def test_a_frozen_weight_under_two_names_is_one_fragment(stage):
    """As embedding and head are that several stages of a rank share."""
    stages = [TiedStage(), TiedStage()]
    stages[1].index = 1
    stages[1].embed.weight = stages[1].head.weight = stages[0].embed.weight
    stages[0].embed.weight.requires_grad_(False)
    for number, module in enumerate(stages):
        named = dict(module.named_parameters())
        module.named_global_parameters = lambda n=number, named=named: iter((f"{n}.{k}", p) for k, p in named.items())
    sharding = Sharding(stages, ZeroConfig(stage=stage), Collectives(num_replicas=1))
    names = [fragment.name for fragment in sharding.fragments()]
    layers = [f"{n}.{name}" for n in range(2) for name, _ in stages[n].layers.named_parameters(prefix="layers")]
    assert sorted(names) == sorted([*layers, "0.embed.weight"])


@pytest.mark.parametrize("stage", range(2))
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)])
def test_fragments_are_shared_out_where_any_kind_of_parameter_has_replicas(stage, counts):
    collectives, *others = (Collectives(num_replicas=count) for count in counts)
    collectives.joint, collectives.expert = others
    assert Sharding([TiedStage()], ZeroConfig(stage=stage), collectives).is_shared_out == (stage > 0 and 2 in counts)
