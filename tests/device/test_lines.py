"""Every line that needs a GPU runs on the emulated one, or the list says why not."""

import ast
import re

from tests.device import lines, waits

SHARE = 0.95


def test_new_device_lines_are_listed():
    found, listed = {str(line) for line in lines.device_lines()}, lines.listed()
    remedy = (
        "run `python -m tests.device.lines`, then give each new line a test of tests/device/test_device.py "
        f"({lines.UPDATE}=1 writes which one runs it), or a reason in brackets"
    )
    assert found == set(listed), f"{lines.LIST.name}: {sorted(found ^ set(listed))}; {remedy}"
    assert lines.UNKNOWN not in listed.values(), remedy


def test_nearly_all_device_lines_run():
    runners = list(lines.listed().values())
    assert sum(not runner.startswith("(") for runner in runners) >= SHARE * len(runners)


def test_each_wait_is_listed_with_what_notices_its_removal():
    remedy = (
        "run `python -m tests.device.waits`, then add a run that executes each new wait to tests/device/mutants.py and "
        "call `python -m tests.device.mutants RUN`, or write a reason in brackets why no device can notice its removal"
    )
    found, listed = waits.all_waits(), waits.listed()
    assert found == set(listed), f"{waits.LIST.name}: {sorted(found ^ set(listed))}; {remedy}"
    assert lines.UNKNOWN not in listed.values(), remedy


def test_lines_behind_conditions_are_found(monkeypatch):
    source = """
        def guarded(tensor, device):
            if tensor.is_cuda and tensor.numel():
                a()
            b() if device.type != "cuda" else c()
            if device.type != "cuda":
                return d()
            return e()

        class Device:
            def __init__(self, device):
                self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

            def wait(self):
                if self.stream is not None:
                    f()
                tensor.record_stream(g())

        def make(device):
            return Only() if device.type == "cuda" else h()

        class Only:
            def run(self):
                i()
    """
    module = ast.parse(re.sub(r"(?m)^        ", "", source))
    for function in (lines.texts, lines.tree, lines.device_lines, lines._words):
        function.cache_clear()
    monkeypatch.setattr(lines, "texts", lambda: {"comm/a.py": ast.unparse(module)})
    try:
        found = [line.text for line in lines.device_lines()]
    finally:
        monkeypatch.undo()
        for function in (lines.tree, lines.device_lines, lines._words):
            function.cache_clear()
    assert found == [
        "a()",
        "c()",
        "return e()",
        "torch.cuda.Stream(device)",
        "f()",
        "tensor.record_stream(g())",
        "Only()",
        "i()",
    ]
