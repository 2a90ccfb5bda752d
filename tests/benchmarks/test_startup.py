"""`benchmarks startup`: it fails where Weft starts or exits later than its peer, or takes more processor time."""

import pytest

from benchmarks import startup
from benchmarks.startup import PEER, WEFT, Run


@pytest.mark.parametrize(("cpu_s", "code"), [(1.0, 0), (1.2, 1)])
def test_a_start_that_takes_more_than_the_peer_fails_the_bench(monkeypatch, cpu_s, code):
    found = {WEFT: [Run(1.0, 1.0, cpu_s)] * 3, PEER: [Run(1.0, 1.0, 1.0)] * 3}
    monkeypatch.setattr(startup, "compare", lambda rounds: found)
    assert startup.main(["--rounds", "3"]) == code
