"""`weft emulate`: bad input."""

import pytest

from weft.recipes.emulation.command import main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cluster.ranks=6"], "pipeline.stages=4: 6 processes are not a multiple of it"),
        (["--real", "first"], "--real first: give auto, or global ranks"),
        (["--at", "3"], "--at 3: give a rank and its settings"),
        (["cluster=two_sites", "cluster.links=[]"], "cluster.links: empty, and there are several sites"),
        (
            ["cluster=two_sites", "cluster.links=[{sites: [east, west], latency_ms: 20}]"],
            "cluster.links: east to west has bandwidth_mbps=0, which a run would measure; give it",
        ),
        (["--delays", "nothing"], "--delays nothing: not known; choose from"),
        (["--real", "4"], "--real 4: there is no such rank; the job has ranks 0 to 3"),
        (["--at", "0", "train.precision=fp32", "--steps", "3"], "--steps: --at compares messages and measures nothing"),
        (["--real", "0", "--most", "2"], "--most: --real names the ranks; leave out one"),
        (["--most", "0"], "--most 0: at least one rank is real"),
        (["--steps", "0"], "--steps 0: give at least 1"),
        (["--json", "/"], "--json /: cannot be written; name a file"),
        (["--record", "/no/such/folder/times"], "--record /no/such/folder/times: cannot be written; name a file"),
    ],
)
def test_bad_input_is_refused_before_any_process_starts(argv, message, monkeypatch):
    monkeypatch.setattr("weft.recipes.emulation.turns.RealRank", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=message):
        main(["recipe=quickstart", *argv])


@pytest.mark.parametrize("link", ["nan,100", "inf,100", "20,nan", "20,inf", "20,0"])
def test_a_link_without_finite_values_is_refused(link, capsys):
    with pytest.raises(SystemExit):
        main(["recipe=quickstart", f"--inside={link}"])
    assert f"'{link}': give LATENCY_US,GBIT_PER_S" in capsys.readouterr().err
