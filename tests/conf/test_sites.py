"""A mapping of hosts to sites is counted where it is right, and refused where it is not."""

import pytest

from weft.conf import load
from weft.conf.batch import check_world
from weft.conf.hosts import most_ranks_of_a_host, world_size
from weft.conf.sites import ranks_per_site

EAST, WEST = "{name: east, hosts: [e0, e1]}", "{name: west, hosts: [w0]}"
LINES = "e0 slots=2\ne1 slots=2\nw0 slots=2\n"


@pytest.fixture
def settings(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(LINES)
    return [f"cluster.hostfile={hostfile}", "pipeline.stages=3", "cluster.master_addr=e0"]


def test_ranks_of_a_site_are_its_slots_over_the_replicas(settings):
    assert ranks_per_site(load([*settings, f"cluster.sites=[{EAST}, {WEST}]"])) == (2, 1)
    assert ranks_per_site(load(["pipeline.stages=3", "cluster.sites=[{name: a, ranks: 2}, {name: b, ranks: 1}]"])) == (
        2,
        1,
    )
    assert ranks_per_site(load([])) == ()


@pytest.mark.parametrize(
    ("sites", "part"),
    [
        (EAST, "host w0 of .* is in no site; add it to one"),
        (f"{EAST}, {{name: west, hosts: [w0, e1]}}", "host e1 is in 2 sites"),
        (f"{EAST}, {{name: west, hosts: [w0, w1]}}", "host w1 is not in"),
        (f"{WEST}, {EAST}", "in the order of the sites"),
        ("{name: east, hosts: [e0, e1], ranks: 1}, " + WEST, "hold 2 pipeline ranks; correct it"),
        ("{name: east, ranks: 2}, {name: west, ranks: 1}", "nothing says which hosts .* list them"),
    ],
)
def test_a_wrong_or_missing_mapping_is_refused(settings, sites, part):
    with pytest.raises(ValueError, match=part):
        load([*settings, f"cluster.sites=[{sites}]"])


def test_replicas_of_a_stage_share_a_site(settings, tmp_path):
    (tmp_path / "hosts").write_text(LINES.replace("e1 slots=2", "e1 slots=1").replace("w0 slots=2", "w0 slots=3"))
    with pytest.raises(ValueError, match="site 'east' make 3 slots, not a multiple of the 2 replicas"):
        load([*settings, f"cluster.sites=[{EAST}, {WEST}]"])


ROUTED = "cluster.sites=[{name: a, ranks: 1}, {name: b, ranks: 2}, {name: c, ranks: 3}]"


def test_sites_of_several_routes_hold_all_stages_each(settings, tmp_path):
    config = load(["pipeline.stages=3", ROUTED, "cluster.routes=[[a, b], [c]]"])
    assert ranks_per_site(config) == (1, 2, 3)
    check_world(config, 12)
    with pytest.raises(ValueError, match="9 processes make 3 replicas of the pipeline, not a multiple of the 2 routes"):
        check_world(config, 9)
    with pytest.raises(ValueError, match=r"comm\.cell=2: 4 processes make 1 replicas of the pipeline on each route"):
        check_world(
            load(
                [
                    "pipeline.stages=2",
                    "cluster.sites=[{name: a, ranks: 2}, {name: b, ranks: 2}]",
                    "cluster.routes=[[a], [b]]",
                    "comm.cell=2",
                ]
            ),
            4,
        )
    (tmp_path / "hosts").write_text("e0 slots=2\ne1 slots=4\nw0 slots=6\n")
    sites = "cluster.sites=[{name: e, hosts: [e0]}, {name: f, hosts: [e1]}, {name: w, hosts: [w0]}]"
    assert ranks_per_site(load([*settings, sites, "cluster.routes=[[e, f], [w]]"])) == (1, 2, 3)


@pytest.mark.parametrize(
    ("routes", "part"),
    [
        ("[[a, b], [d]]", "'d' is no site; cluster.sites has a, b, c"),
        ("[[a, b], [c, a]]", "site 'a' is named 2 times"),
        ("[[a, b]]", "site 'c' is on no route"),
        ("[[a, b], [], [c]]", "a route without sites"),
        ("[[c], [a, b]]", "list the sites in the order c, a, b"),
        ("[[a], [b, c]]", r"the sites of a route hold 1 = 1 pipeline ranks; make cluster\.sites add up to it"),
    ],
)
def test_routes_that_make_no_sense_are_refused(routes, part):
    with pytest.raises(ValueError, match=part):
        load(["pipeline.stages=3", ROUTED, f"cluster.routes={routes}"])


def test_routes_of_hosts_are_alike_and_their_cells_are_cut_alike(settings, tmp_path):
    sites = "cluster.sites=[{name: e, hosts: [e0, e1]}, {name: w, hosts: [w0]}]"
    with pytest.raises(ValueError, match="2 replicas of 3 stages cannot be shared out evenly over 3 routes"):
        load(
            [
                *settings,
                "cluster.sites=[{name: e, hosts: [e0]}, {name: f, hosts: [e1]}, {name: w, hosts: [w0]}]",
                "cluster.routes=[[e], [f], [w]]",
            ]
        )
    with pytest.raises(ValueError, match=r"the sites e hold 4 pipeline ranks of 1 replicas, and pipeline\.stages=3"):
        load([*settings, sites, "cluster.routes=[[e], [w]]"])
    with pytest.raises(ValueError, match=r"comm\.cell=2: the DP-cells of all routes follow one schedule"):
        load(["pipeline.stages=3", ROUTED, "cluster.routes=[[a, b], [c]]", "comm.cell=2"])


def test_hosts_without_a_hostfile_are_refused():
    with pytest.raises(ValueError, match=r"there is none; set cluster\.hostfile"):
        load([f"cluster.sites=[{EAST}, {WEST}]"])


def test_a_cell_has_at_most_as_many_pipelines_as_there_are():
    with pytest.raises(ValueError, match=r"comm\.cell=3: 4 processes make 2 replicas"):
        check_world(load(["comm.cell=3", "pipeline.stages=2"]), 4)


def test_spares_are_not_counted(settings, tmp_path):
    (tmp_path / "hosts").write_text("e0 slots=2\ne1 slots=2\ne2 slots=8\nw0 slots=2\n")
    sites = "cluster.sites=[{name: east, hosts: [e0, e1, e2]}, {name: west, hosts: [w0]}]"
    config = load([*settings, sites, "cluster.spares=[e2]"])
    assert ranks_per_site(config) == (2, 1)
    assert world_size(config.cluster) == 6
    assert most_ranks_of_a_host(config.cluster) == 2


@pytest.mark.parametrize(
    ("spares", "part"),
    [
        ("[e3]", r"cluster\.spares=\['e3'\]: e3 is not in"),
        ("[e0, e1, w0]", "no host of .* is left to work; spare fewer"),
    ],
)
def test_spares_that_make_no_sense_are_refused(settings, spares, part):
    with pytest.raises(ValueError, match=part):
        load([*settings, f"cluster.sites=[{EAST}, {WEST}]", f"cluster.spares={spares}"])


SLURM = ["cluster.manager=slurm", "cluster.ranks=2", "pipeline.stages=3"]


def test_nodes_that_a_cluster_manager_chooses():
    config = load([*SLURM, "cluster.sites=[{name: a, nodes: 2, spares: 3}, {name: b, nodes: 1}]"])
    assert world_size(config.cluster) == 6
    assert ranks_per_site(config) == (2, 1)


@pytest.mark.parametrize(
    ("sites", "part"),
    [
        ("", r"slurm is asked for hosts site by site; set cluster\.sites=\[{name: here, nodes: 2}\]"),
        ("{name: a}", r"cluster\.sites\.nodes=0: site 'a' needs at least 1"),
        ("{name: a, nodes: 3, spares: -1}", r"cluster\.sites\.spares=-1"),
        ("{name: a, nodes: 3, hosts: [n0]}", "slurm chooses the hosts; give site 'a' nodes instead"),
        (
            "{name: a, nodes: 3}, {name: b, nodes: 3}",
            "2 ranks on each host of site 'a' make 6 slots, not a multiple of the 4 replicas",
        ),
    ],
)
def test_nodes_that_make_no_sense_are_refused(sites, part):
    with pytest.raises(ValueError, match=part):
        load([*SLURM, f"cluster.sites=[{sites}]"])
