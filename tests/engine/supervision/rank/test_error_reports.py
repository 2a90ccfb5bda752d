"""The error that ends a rank has a class, and is left in a file for whoever watches over the rank."""

import errno

import pytest
import torch
import torch.distributed as dist

from weft.comm.channel import ChannelError
from weft.engine.attempt import Attempt
from weft.engine.checkpoint import CheckpointError
from weft.engine.checkpoint.durable import NoSpaceError
from weft.engine.distributed import SharedError
from weft.engine.execution.batches import DataEnded
from weft.engine.observability.watcher import ERROR_FILE
from weft.engine.supervision.faults import read_report
from weft.engine.supervision.messages import FaultKind
from weft.engine.supervision.rank.attempts import fault_of, reported
from weft.engine.zero import NonFiniteError, ReplicasDiffer
from weft.engine.zero.origin import Source


def _no_memory() -> BaseException:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("train.steps=-1"), FaultKind.input_error),
        (DataEnded("too few"), FaultKind.input_error),
        (SharedError("told to all"), FaultKind.input_error),
        (SharedError("told to all", "CheckpointError"), FaultKind.checkpoint),
        (SharedError("told to all", "NoSpaceError"), FaultKind.disk_full),
        (SharedError("told to all", "FileNotFoundError"), FaultKind.input_error),
        (NonFiniteError("step 3"), FaultKind.bad_numbers),
        (ReplicasDiffer("after step 3: rank 1", 2), FaultKind.corruption),
        (CheckpointError("damaged"), FaultKind.checkpoint),
        (NoSpaceError("full"), FaultKind.disk_full),
        (OSError(errno.ENOSPC, "No space left on device"), FaultKind.disk_full),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), FaultKind.host_memory),
        (OSError(errno.EACCES, "Permission denied"), FaultKind.other),
        (MemoryError(), FaultKind.host_memory),
        (_no_memory(), FaultKind.host_memory),
        (torch.OutOfMemoryError("CUDA out of memory"), FaultKind.device_memory),
        (ChannelError("link rank 1 -> rank 2"), FaultKind.lost_peer),
        (dist.DistNetworkError("no route"), FaultKind.lost_peer),
        (RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), FaultKind.lost_peer),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), FaultKind.other),
        (KeyError("name"), FaultKind.other),
    ],
)
def test_an_error_has_a_class(error, kind):
    assert fault_of(error) is kind


def test_what_fails_leaves_a_report(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "errors" / "0.json"))
    training = Attempt()
    training.where = lambda: (7, (96, 112))
    with pytest.raises(NonFiniteError), reported(Attempt()), reported(training):
        raise NonFiniteError("step 7: nan")
    found = read_report(tmp_path / "errors" / "0.json")
    assert found is not None
    assert (found.kind, found.message, found.step, found.data) == (
        FaultKind.bad_numbers,
        "step 7: nan",
        7,
        (96, 112),
    )


@pytest.mark.parametrize(
    ("error", "kind", "ranks"),
    [
        (ReplicasDiffer("after step 3: ranks 4, 5 do not agree", 2, (4, 5)), FaultKind.corruption, (4, 5)),
        (NonFiniteError("step 3: nan", Source((1,))), FaultKind.bad_numbers, (1,)),
    ],
)
def test_ranks_that_an_error_names_are_reported(tmp_path, monkeypatch, error, kind, ranks):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "0.json"))
    with pytest.raises(type(error)), reported(Attempt()):
        raise error
    found = read_report(tmp_path / "0.json")
    assert found is not None
    assert (found.kind, found.ranks) == (kind, ranks)


def test_an_error_without_words_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "0.json"))
    with pytest.raises(MemoryError), reported(Attempt()):
        raise MemoryError
    found = read_report(tmp_path / "0.json")
    assert found is not None
    assert (found.message, found.step) == ("MemoryError", None)


def test_what_ends_well_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "0.json"))
    with reported(Attempt()):
        pass
    with pytest.raises(SystemExit), reported(Attempt()):
        raise SystemExit(0)
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "file" / "0.json"))
    with pytest.raises(KeyError), reported(Attempt()):
        raise KeyError("name")
    assert ERROR_FILE in capsys.readouterr().err


def test_nothing_is_written_without_a_supervisor(tmp_path, monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError), reported(Attempt()):
        raise KeyError("name")
    assert not list(tmp_path.iterdir())
