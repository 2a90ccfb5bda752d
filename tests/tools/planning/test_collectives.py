"""`weft plan` and the dry run say how collectives would be partitioned and overlapped."""

import pytest

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key
from weft.tools import cli

MODEL = [
    "zero.stage=1",
    "model=tiny_llama",
    "+model.overrides.vocab_size=64",
    "pipeline.schedule=interleaved",
    "pipeline.chunks_per_rank=2",
    "cluster.ranks=4",
]
LINKS = ["--nodes", "2", "--intra", "10:80", "--inter", "500:0.1"]


def run(capsys, *argv):
    code = cli.main([*argv, *MODEL])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_every_tier_gives_its_reason(capsys):
    code, text = run(capsys, "plan", *LINKS)
    assert code == 0, text
    for part in ("on 2+2 ranks", "reduce_scatter intra 2, reduce_scatter inter 2", "best of 40 rewrites"):
        assert part in text
    assert text.count("operation tier:") == 4
    assert text.count("layer tier:") == text.count("model tier:") == 2
    assert "micro-batches launched together" in text and "buckets end at" in text


def test_measured_costs_are_taken_from_the_cache(capsys, tmp_path):
    folder = f"data.cache_dir={tmp_path}"
    assert "not measured; `python -m benchmarks collectives` does it" in run(capsys, "plan", folder)[1]
    links = {LinkClass.intra: AlphaBeta(1e-5, 1e-10)}
    key = topology_key(regular(1, 4), "cpu")
    CostCache.in_folder(str(tmp_path)).write(key, CollectiveCosts.of_links(links))
    code, text = run(capsys, "plan", folder)
    assert code == 0, text
    assert "reduce_scatter intra 4 | 1 chunk" in text


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["cluster.ranks=1"], "there is one replica and nothing to reduce"),
        (["--nodes", "3"], "--nodes=3: 4 replicas cannot be spread evenly"),
        (["--intra", "10:80"], "over mixed links: not measured"),
    ],
)
def test_bad_input_is_one_line(capsys, options, part):
    code = cli.main(["plan", "--nodes", "2", *MODEL, *options])
    error = capsys.readouterr().err
    assert code == 2
    assert part in error and len(error.splitlines()) == 1
