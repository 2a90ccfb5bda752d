"""Credentials in URLs reach the ranks, and nothing that is shown or stored."""

import json
import os

import pytest

from weft.conf import load
from weft.conf.host.private import without_credentials
from weft.conf.host.terminal import print_error
from weft.conf.sources import pass_credentials
from weft.conf.trees import to_yaml

SECRET = "sEcr3t"
URLS = {
    f"s3://AKIA:{SECRET}@bucket/a.jsonl": "s3://***@bucket/a.jsonl",
    f"s3://AKIA:{SECRET}/with/slashes+@bucket/a.jsonl": "s3://***@bucket/a.jsonl",
    f"https://user:{SECRET}@host:8080/a.jsonl": "https://***@host:8080/a.jsonl",
    f"https://{SECRET}@host/a.jsonl": "https://***@host/a.jsonl",
    f"https://host/a.jsonl?token={SECRET}&part=3": "https://host/a.jsonl?token=***&part=3",
    f"https://host/a.jsonl?sv=2024&sig={SECRET}%3D": "https://host/a.jsonl?sv=2024&sig=***",
    f"https://host/a?X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}": "https://host/a?X-Amz-Signature=***"
    "&X-Amz-Security-Token=***",
    f"https://host/a?api_key={SECRET}#access_token={SECRET}": "https://host/a?api_key=***#access_token=***",
    f"simplecache::ftp://me:{SECRET}@host/a": "simplecache::ftp://***@host/a",
}
PLAIN = (
    "s3://bucket/a@b.jsonl",
    "http://host:8080/a@b.jsonl?page=2",
    "hf://datasets/owner/name@0123abc/train.jsonl",
    "github://owner:name@main/a.jsonl",
    "memory://bucket/*.parquet",
    "a file about https://host/ and me@host",
)


@pytest.mark.parametrize("url", URLS)
def test_credentials_of_a_url_are_hidden_wherever_it_stands(url):
    assert without_credentials(url) == URLS[url]
    text = f"path: '{url}'\nother: \"{url}\" and {url}: (see {url}), {url}.\n"
    assert without_credentials(text) == text.replace(url, URLS[url])
    assert without_credentials({"a": [url, 1, None]}) == {"a": [URLS[url], 1, None]}


@pytest.mark.parametrize("url", PLAIN)
def test_urls_without_credentials_stay(url):
    assert without_credentials(url) == url


def settings(url):
    return [
        *("data.kind=text", "model.path=/model", "data.sequence_length=16"),
        f"data.sources=[{{path: '{url}'}}, {{path: plain.jsonl}}]",
    ]


def test_a_stored_configuration_has_no_credentials_and_ranks_have_them(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_URL_CREDENTIALS", raising=False)
    url = f"https://user:{SECRET}@host/a.jsonl"
    config = load(settings(url))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert SECRET not in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"data\.path=https://\*\*\*@host/a\.jsonl: \*\*\* stands for credentials"):
        load([], recipe_file=str(tmp_path / "config.yaml"))
    pass_credentials(config.data, os.environ)
    assert load([], recipe_file=str(tmp_path / "config.yaml")) == config


def test_without_credentials_nothing_is_passed():
    environment = {}
    pass_credentials(load(settings("https://host/a.jsonl")).data, environment)
    assert not environment


@pytest.mark.parametrize("text", ["", "[]", "{}", "nothing", json.dumps({"https://***@host/a.jsonl": None})[:-1]])
def test_a_damaged_variable_is_refused_in_one_line(monkeypatch, text):
    monkeypatch.setenv("WEFT_URL_CREDENTIALS", text)
    with pytest.raises(ValueError, match=r"set WEFT_URL_CREDENTIALS to JSON such as") as caught:
        load(settings("https://***@host/a.jsonl"))
    assert "\n" not in str(caught.value)


def test_errors_show_no_credentials(capsys):
    print_error("weft launch", ValueError(f"data.path=https://user:{SECRET}@host/a.jsonl: cannot be read"))
    assert capsys.readouterr().err == "weft launch: data.path=https://***@host/a.jsonl: cannot be read\n"
