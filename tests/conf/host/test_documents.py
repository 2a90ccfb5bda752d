"""YAML of users: as deep and as large as it may be, and plain values alone."""

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.conf.host.documents import read_text, read_yaml
from weft.pipeline.profile import load_costs


def write(tmp_path, text):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ("{a: ", "}")])
def test_brackets_are_nested_up_to_32_deep(tmp_path, opened, closed):
    def nested(depth):
        return read_yaml(write(tmp_path, opened * depth + "1" + closed * depth), most_bytes=1000)

    value = nested(32)
    for _ in range(32):
        value = value[0] if isinstance(value, list) else value["a"]
    assert value == 1
    with pytest.raises(ValueError, match="nested more than 32 deep"):
        nested(33)
    side_by_side = "[" + ", ".join(["[1]"] * 100) + "]"
    assert read_yaml(write(tmp_path, side_by_side), most_bytes=1000) == [[1]] * 100


TAGGED = ["a: !!bool maybe", "a: !!timestamp soon"]


@pytest.mark.parametrize("text", ["a: [1", "!!python/object/apply:os.getcwd []", "a: b: c", "{a: 1, a: 2}", *TAGGED])
def test_what_is_no_plain_value_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="cannot be read"):
        read_yaml(write(tmp_path, text), most_bytes=1000)


@pytest.mark.parametrize("value", ["SECRET: b", '"SECRET', "*SECRET", "!SECRET ", "[SECRET", "!x!SECRET"])
def test_an_error_of_yaml_names_the_line_without_its_text(tmp_path, value):
    with pytest.raises(ValueError, match=r"not YAML \(line \d, column \d+: ") as raised:
        read_yaml(write(tmp_path, f"a: 1\nb: {value}"), most_bytes=1000)
    assert "SECRET" not in "".join(traceback.format_exception(raised.value))


def test_costs_take_up_to_two_mebibytes(tmp_path):
    with pytest.raises(ValueError, match="more than 2 MiB; give a smaller file"):
        load_costs(write(tmp_path, "#" * (2 * 2**20 + 1)), 2)


@given(st.text(max_size=40), st.integers(0, 60))
def test_a_file_is_read_up_to_its_most_bytes(tmp_path_factory, text, most_bytes):
    path = tmp_path_factory.mktemp("limits") / "file"
    path.write_bytes(text.encode())
    if len(text.encode()) <= most_bytes:
        assert read_text(path, most_bytes=most_bytes) == text
    else:
        with pytest.raises(ValueError, match=r"more than 0 MiB; give a smaller file|cannot be read"):
            read_text(path, most_bytes=most_bytes)


@pytest.mark.parametrize("data", [b"\xff", None])
def test_what_is_no_text_or_not_there_cannot_be_read(tmp_path, data):
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read"):
        read_text(path)
