"""The record of tensors counts what any thread allocates and frees."""

from threading import Thread

import torch

from weft.recipes.emulation.tensor_peak import TensorPeak

SIZE = 1_000_000


def tensor():
    return torch.empty(SIZE, dtype=torch.uint8)


def in_thread(work):
    thread = Thread(target=work)
    thread.start()
    thread.join()


def test_a_tensor_that_another_thread_frees_is_no_longer_counted():
    peak = TensorPeak()
    for _ in range(4):
        held = [tensor()]
        in_thread(held.clear)
    assert peak.stop() == SIZE


def test_a_tensor_of_another_thread_is_counted():
    peak, held = TensorPeak(), []
    in_thread(lambda: held.append(tensor()))
    held.append(tensor())
    assert peak.stop() == 2 * SIZE


def test_a_peak_does_not_count_what_was_allocated_before():
    before = [TensorPeak(), tensor()]
    assert before[0].stop() == SIZE
    peak = TensorPeak()
    tensor()
    assert peak.stop() == SIZE
    assert TensorPeak().stop() == 0


def test_a_mapped_file_is_counted_while_it_is_mapped(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    peak = TensorPeak()
    for _ in range(2):
        mapped = torch.from_file(str(tmp_path / "weights"), size=SIZE, dtype=torch.uint8)
        tensor()
        del mapped
    assert peak.stop() == 2 * SIZE
