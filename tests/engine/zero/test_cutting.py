"""Which chunks and blocks a stage is cut into."""

import pytest
import torch
from torch import nn

from weft.conf.schema import ZeroConfig
from weft.engine.zero import Collectives
from weft.engine.zero.cutting import cut, outside_blocks


class TiedStage(nn.Module):
    """An embedding that is tied to the head, and two blocks between them."""

    index = 0
    tied: frozenset[str] = frozenset()

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
@pytest.mark.parametrize("bucket", [1, 20, 45, 1000])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_chunks(stage, bucket, replicas):
    """Every parameter keeps its values and lies in one chunk; fragments of all replicas make it whole once."""
    module = TiedStage()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    zero = ZeroConfig(stage=stage, reduce_bucket_size=bucket)
    found: dict[str, dict[int, torch.Tensor]] = {}
    for replica in range(replicas):
        copy = TiedStage()
        copy.load_state_dict(module.state_dict())
        chunks = cut([copy], zero, Collectives(replica=replica, num_replicas=replicas), {}, {})
        members = [member.name for chunk in chunks for member in chunk.members]
        assert sorted(members) == sorted(before)
        for chunk in chunks:
            assert len(chunk.members) == 1 or sum(m.parameter.numel() for m in chunk.members) <= bucket
            for fragment in chunk.fragments:
                assert fragment.shared is (stage == 0)
                found.setdefault(fragment.name, {})[fragment.start] = fragment.tensor.flatten()
    for name, parts in found.items():
        assert torch.equal(torch.cat([parts[start] for start in sorted(parts)]), before[name].flatten())


def test_what_is_tied_to_a_block_lies_outside_of_it():
    module = TiedStage()
    assert outside_blocks(module) == {module.embed.weight}
    (first, *_) = cut([module], ZeroConfig(stage=3), Collectives(), {}, {})
    assert [member.name for member in first.members] == ["embed.weight"]


def test_chunks_end_where_the_plan_says():
    module = TiedStage()  # 40 elements of embedding and head, then twice 16 + 4
    cuts = {0: (0.5, 0.75)}
    for stage, names in ((1, ["embed", "layers.0", "layers.1"]), (3, ["embed", "layers.0", "layers.1"])):
        chunks = cut([module], ZeroConfig(stage=stage), Collectives(num_replicas=2), {}, cuts)
        assert [sorted({m.name.rsplit(".", 1)[0] for m in chunk.members}) for chunk in chunks] == [[n] for n in names]


def test_what_stays_whole_at_stage_3():
    module = TiedStage()
    zero = ZeroConfig(stage=3, param_persistence_threshold=20, model_persistence_threshold=36)
    chunks = cut([module], zero, Collectives(num_replicas=2), {}, {})
    found = [(chunk.sharded, [member.name for member in chunk.members]) for chunk in chunks]
    assert found == [
        (False, ["layers.0.weight", "layers.0.bias", "layers.1.weight"]),
        (True, ["embed.weight"]),
        (True, ["layers.1.bias"]),
    ]
