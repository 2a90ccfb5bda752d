"""Operations and bytes of a model's parts become seconds: by speed, by kind, and over the links of their axis."""

from weft.pipeline.strands.segments import Kind, LinkScope, Segment, StageStrands, Strand, StrandPair, WeightGradient
from weft.pipeline.strands.work import PartWork, SegmentWork, Speed, StrandWork, Traffic, Work

SPEED = Speed(flops_per_s=10.0, bytes_per_s=4.0)
LINKS = {"tensor": LinkScope.inside_host, "expert": LinkScope.between_hosts}


def traffic_s(traffic):
    return traffic.num_bytes / (2.0 if traffic.primitive == "all_gather" else 1.0)


def timed(part):
    return part.timed(SPEED, traffic_s, LINKS.__getitem__)


def test_work_takes_seconds_of_each_kind():
    work = Work(product_flops=20.0, attention_flops=5.0, moved_bytes=12.0)
    assert work.by_kind(SPEED) == {Kind.gemm: 2.0, Kind.attention: 0.5, Kind.memory: 3.0}
    assert work.by_kind(Speed(10.0))[Kind.memory] == 0.0, "as fast as may be where it is not said"
    assert work + Work(1.0, 2.0, 3.0) == Work(21.0, 7.0, 15.0)
    assert Work() == Work(0.0, 0.0, 0.0)


def test_a_segment_is_of_the_kind_that_takes_longest():
    gathered = SegmentWork(Work(20.0, 5.0, 12.0), Traffic("tensor", "all_gather", 6.0))
    sent = SegmentWork(Work(30.0, 5.0), Traffic("expert", "all_to_all", 6.0))
    last = SegmentWork(Work(attention_flops=5.0))
    part = timed(PartWork((gathered, last), (sent,), ((0, Work(10.0, 0.0, 4.0)),)))
    assert part == StrandPair(
        Strand(
            (
                Segment(5.5, LinkScope.inside_host, 3.0, Kind.memory),
                Segment(0.5, kind=Kind.attention),
            )
        ),
        Strand((Segment(3.5, LinkScope.between_hosts, 6.0, Kind.gemm),)),
        (WeightGradient(0, 2.0),),
    )


def test_a_stage_has_its_layers_and_the_ends_of_the_model():
    def part(flops):
        return PartWork((SegmentWork(Work(flops)),), (SegmentWork(Work(2 * flops)),))

    before, light, heavy, after = (part(flops) for flops in (1.0, 2.0, 3.0, 4.0))
    work = StrandWork.of(before, [light, heavy, light, light], after)
    assert work.layers == (light, heavy) and work.order == (0, 1, 0, 0)
    stage = work.timed(SPEED, traffic_s, LINKS.__getitem__)
    assert stage(range(2, 4), False, False) == StageStrands(((timed(light), 2),))
    assert stage(range(0, 2), True, False) == StageStrands(((timed(before), 1), (timed(light), 1), (timed(heavy), 1)))
    assert stage([3], False, True) == StageStrands(((timed(light), 1), (timed(after), 1)))
