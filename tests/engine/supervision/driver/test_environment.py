"""Which variables agents on other hosts get."""

import json
import os

from weft.conf import load
from weft.tools import launch
from weft.tools.launch_arguments import for_other_hosts


def test_variables_that_ranks_need_elsewhere_are_for_other_hosts():
    needed = {"NCCL_SOCKET_IFNAME": "eth1", "UCX_TLS": "tcp", "LD_LIBRARY_PATH": "/opt/lib", "PYTHONPATH": "/src"}
    needed |= {"https_proxy": "http://p:1", "NO_PROXY": "localhost", "PYTORCH_CUDA_ALLOC_CONF": "x", "HF_HOME": "/hf"}
    own = {"PATH": "/bin", "HOME": "/root", "HOSTNAME": "a", "CUDA_VISIBLE_DEVICES": "1", "TMPDIR": "/tmp"}
    assert for_other_hosts(needed | own) == needed


def test_a_supervised_run_gets_all_of_the_users_own_environment_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text("MY_FABRIC=fast\nNCCL_DEBUG=INFO\n")
    config = load(["recipe=quickstart", f"train.output_dir={tmp_path}", "supervise.enabled=true"])
    monkeypatch.setattr(os, "execve", lambda *_: None)
    launch.supervise(config, tmp_path / "quickstart", {"NCCL_DEBUG": "WARN", "SHELL": "sh"})
    found = json.loads((tmp_path / "quickstart" / "supervisor" / "job.json").read_text())["environment"]
    assert found == {"MY_FABRIC": "fast", "NCCL_DEBUG": "WARN"}
