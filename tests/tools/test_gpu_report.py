"""The report of a GPU machine says of every item what came of it, also where something is missing or fails."""

import tarfile

from weft.tools import gpu_report
from weft.tools.gpu_report import Item, main


def test_every_item_is_accounted_for(tmp_path, monkeypatch, capsys):
    made = (
        Item("good", "that it goes well", ("-m", "this"), 0),
        Item("bad", "that it fails", ("-m", "weft.tools.cli", "nothing"), 0),
        Item("slow", "that it ends", ("-m", "http.server", "0"), 0),
        Item("gone", "a program that is not here", ("no-such-program",), 0),
        Item("many", "more than there is", ("-m", "this"), 1000),
    )
    monkeypatch.setattr(gpu_report, "items", lambda: made)
    out = tmp_path / "found"
    assert main(["--out", str(out), "--seconds", "15"]) == 1
    text = (out / "report.md").read_text()
    assert "| good | that it goes well | passed after" in text and "Namespaces are" in text
    assert "| bad | that it fails | FAILED with 2" in text and "there is no command 'nothing'" in text
    assert "| slow | that it ends | FAILED: had not ended after 15 s" in text
    assert "left out: there is no no-such-program here" in text
    assert "left out: needs 1000 GPUs" in text
    with tarfile.open(f"{out}.tar.gz") as tar:
        assert {"found/report.md", "found/good.txt"} <= set(tar.getnames())
    assert capsys.readouterr().out.count("\n") == len(made) + 1


def test_every_command_is_one(tmp_path):
    """Modules exist, and runs are ones that `weft launch` takes."""
    import importlib.util

    from weft.conf import load

    for item in gpu_report.items():
        if item.command[0] == "-m":
            assert importlib.util.find_spec(item.command[1]), item
        if "launch" in item.command:
            load(list(item.command[3:]))
