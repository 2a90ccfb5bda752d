"""A run's folder of somebody else neither blocks its reader, nor fills memory, nor steers the terminal."""

import json
import os

import pytest

from tests.tools.watch.recorded import Recording
from weft.tools.cli import main
from weft.tools.watch.record import RunRecord
from weft.tools.watch.views import Views

DEEP = "[" * 100_000
MERGES = "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], b: *a{n - 1}}}\n" for n in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + MERGES
FILES = ("config.yaml", "plan.json", "metrics.jsonl", "watch/now-host.json", "watch/steps-x-1.parquet")
FILES += ("watch/spans-x-1.parquet", "supervisor/logs/rank0.log")
ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture
def folder(tmp_path):
    recording = Recording(tmp_path / "run", name=f"run{ESCAPE}")
    recording.run(3)
    (tmp_path / "run" / "supervisor" / "logs").mkdir(parents=True)
    return recording.write()


def read_or_refuse(folder):
    """Return False if the run is refused in a line, and True if it is shown."""
    try:
        Views(RunRecord(folder)).show("overview")
    except ValueError as error:
        assert str(folder) in str(error) and "\n" not in str(error) and len(str(error)) < 1000
        return False
    return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "sparse", "device", "deep", "merges", "bytes"])
@pytest.mark.parametrize("name", FILES)
def test_a_planted_file_is_refused_or_left_out(folder, name, kind):
    path = folder / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "sparse":
            path.touch()
            os.truncate(path, 100 << 30)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.write_bytes({"deep": DEEP.encode(), "merges": MERGES.encode(), "bytes": b"\xff\xfe"}[kind])
    assert read_or_refuse(folder) == (name not in FILES[:2])


@pytest.mark.parametrize(
    ("field", "value"),
    [("sites", [[10**12]]), ("placement", {"groups": [10**12], "legs": "d", "sites": [10**12]}), ("ranks", [[0]])],
)
def test_a_plan_of_other_sizes_is_refused(folder, field, value):
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {field: value}))
    assert not read_or_refuse(folder)


@pytest.mark.parametrize("command", [["watch", "--text", "--once"], ["explain"]])
def test_names_in_a_run_do_not_steer_the_terminal(folder, capsys, command):
    (folder / "watch" / "now-host.json").write_text(
        json.dumps({"host": ESCAPE, "at": 0, "ranks": [{"rank": 0, "slot": ESCAPE, "step": 1, "alive": False}]})
    )
    assert main([command[0], str(folder), *command[1:]]) == 0
    shown = capsys.readouterr().out
    assert "owned" in shown and "\x1b]" not in shown and "\x07" not in shown


def test_an_error_does_not_steer_the_terminal(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(f"{json.dumps(ESCAPE)}: 1\n")
    assert main(["config", f"recipe={tmp_path}/recipe.yaml"]) == 2
    assert "owned" in (shown := capsys.readouterr().err) and "\x1b" not in shown
