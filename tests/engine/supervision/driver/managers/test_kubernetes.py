"""A JobSet: every part by Kubernetes's published schemas, and the whole by what JobSet's API asks for."""

import jsonschema
import kubernetes_validate
import pytest
import yaml

from weft.conf import load
from weft.conf.trees import from_tree
from weft.engine.supervision.driver.managers.kubernetes import job_set
from weft.tools.cli import main

VERSION = "1.31"
EAST = "{name: east, nodes: 2, spares: 1, select: {topology.kubernetes.io/zone: east-1}}"
WEST = "{name: west, nodes: 2}"
SETTINGS = [
    "model.arch=llama",
    "cluster.manager=kubernetes",
    "cluster.ranks=8",
    "pipeline.stages=4",
    f"cluster.sites=[{EAST}, {WEST}]",
    "cluster.kubernetes.image=registry.example.com/weft:1",
    "cluster.kubernetes.claim=runs",
    "cluster.kubernetes.namespace=training",
    "train.output_dir=/runs",
    "train.name=fold",
]

# What JobSet's API (v1alpha2) asks of the fields that are used here; any other is a mistake.
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def fields(required, **properties):
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


METADATA = fields(["name", "namespace", "labels"], name=NAME, namespace=NAME, labels={"type": "object"})
BOOLEAN, COUNT = {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
DEPENDS = fields(["name", "status"], name=NAME, status={"enum": ["Ready", "Complete"]})
REPLICATED = fields(
    ["name", "template"],
    name=NAME,
    replicas=COUNT,
    template={"type": "object", "required": ["spec"]},
    dependsOn={"type": "array", "items": DEPENDS, "maxItems": 1},
)
JOB_SET = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA,
    spec=fields(
        ["replicatedJobs"],
        network=fields([], enableDNSHostnames=BOOLEAN, subdomain=NAME, publishNotReadyAddresses=BOOLEAN),
        successPolicy=fields(["operator"], operator={"enum": ["All", "Any"]}, targetReplicatedJobs={"type": "array"}),
        failurePolicy=fields([], maxRestarts=COUNT),
        replicatedJobs={"type": "array", "items": REPLICATED},
    ),
)


def made(*more):
    return list(yaml.safe_load_all(job_set(load([*SETTINGS, *more]))))


def jobs(*more):
    return {job["name"]: job["template"]["spec"] for job in made(*more)[1]["spec"]["replicatedJobs"]}


def container(job):
    (only,) = job["template"]["spec"]["containers"]
    return only


def test_the_whole_is_what_the_api_asks_for():
    settings, whole = made()
    jsonschema.validate(whole, JOB_SET)
    kubernetes_validate.validate(settings, VERSION, strict=True)
    for spec in jobs().values():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "part"}, "spec": spec}
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_a_mistake_would_be_seen():
    spec = jobs()["east"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "part"}, "spec": {**spec, "paralelism": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)
    whole = made()[1]
    whole["spec"]["network"]["enableDnsHostnames"] = True
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(whole, JOB_SET)


def test_one_replicated_job_for_each_site_and_one_for_the_driver():
    parts = jobs()
    assert list(parts) == ["east", "west", "driver"]
    assert parts["east"]["completions"] == parts["east"]["parallelism"] == 3
    assert parts["west"]["completions"] == 2 and parts["driver"]["completions"] == 1
    assert parts["east"]["template"]["spec"]["nodeSelector"] == {"topology.kubernetes.io/zone": "east-1"}
    assert "nodeSelector" not in parts["west"]["template"]["spec"]
    assert container(parts["east"])["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert "resources" not in container(parts["driver"])
    for spec in parts.values():
        assert len(container(spec)["ports"]) == 1
        assert {"startupProbe", "livenessProbe"} <= set(container(spec))


def test_cpus_ask_for_no_device():
    assert "resources" not in container(jobs("cluster.kubernetes.gpu_resource=''")["east"])


def test_the_key_is_named_and_never_written(monkeypatch):
    monkeypatch.setenv("WEFT_KEY", "do-not-write-this-anywhere")
    text = job_set(load(SETTINGS))
    assert "do-not-write-this-anywhere" not in text
    for spec in jobs().values():
        (variable,) = container(spec)["env"]
        assert variable == {"name": "WEFT_KEY", "valueFrom": {"secretKeyRef": {"name": "weft-key", "key": "WEFT_KEY"}}}


def test_what_pods_read_is_a_configuration_with_hosts(tmp_path):
    data = made()[0]["data"]
    hosts = [f"fold-east-0-{index}.fold" for index in range(3)] + [f"fold-west-0-{index}.fold" for index in range(2)]
    assert data["hostfile"] == "".join(f"{host} slots=8\n" for host in hosts)
    config = from_tree(yaml.safe_load(data["config.yaml"]), source="the ConfigMap")
    assert config.cluster.spares == ["fold-east-0-2.fold"] and config.cluster.master_addr == hosts[0]
    assert [site.hosts for site in config.cluster.sites] == [hosts[:3], hosts[3:]]
    assert config.cluster.master_port == container(jobs()["driver"])["ports"][0]["containerPort"]
    (tmp_path / "hostfile").write_text(data["hostfile"])
    (tmp_path / "config.yaml").write_text(data["config.yaml"].replace("/etc/weft/hostfile", f"{tmp_path}/hostfile"))
    load([], recipe_file=str(tmp_path / "config.yaml"))  # nothing to refuse


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("cluster.kubernetes.image=''", r"cluster\.kubernetes\.image='': a JobSet needs it"),
        ("cluster.kubernetes.claim=''", r"cluster\.kubernetes\.claim='': a JobSet needs it"),
        ("train.output_dir=runs", r"train\.output_dir=runs: the claim is mounted there"),
        ("train.name=Fold_1", r"train\.name=Fold_1: Kubernetes takes small letters"),
        (f"train.name={'a' * 60}", "shorten it"),
        ("cluster.sites=[{name: driver, nodes: 1}]", r"driver\): Kubernetes|driver: Kubernetes|=driver"),
    ],
)
def test_what_kubernetes_would_refuse(setting, part):
    with pytest.raises(ValueError, match=part):
        made(setting)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    assert main(["launch", *SETTINGS, "--write", str(file)]) == 0
    assert f"{file} is written" in capsys.readouterr().out
    assert [part["kind"] for part in yaml.safe_load_all(file.read_text())] == ["ConfigMap", "JobSet"]
    assert main(["launch", *SETTINGS]) == 2
    assert "give --write job.yaml" in capsys.readouterr().err
    assert main(["launch", *SETTINGS, "supervise.enabled=false", "--write", str(file)]) == 2
    assert "it takes a supervisor" in capsys.readouterr().err
    assert main(["launch", "recipe=quickstart", "--write", str(file)]) == 2
    assert "nothing is asked for" in capsys.readouterr().err
