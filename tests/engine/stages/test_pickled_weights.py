"""Folders whose weights are files of `torch.save`: checked as those of safetensors, and nothing in them is executed."""

import json
import pickle
import zipfile

import pytest
import torch

from tests.engine.stages.tiny import tiny, whole
from weft.conf.schema import ModelConfig
from weft.engine.stages.files.folder import tensor_types, weight_files
from weft.engine.stages.files.loading import check_model_fits

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=["single", "sharded", "legacy"])
def folder(request, tmp_path):
    """A model's folder with pickled weights, and a function that rewrites them."""
    model = whole(tiny("llama"))
    model.config.save_pretrained(tmp_path)

    def write(change=lambda tensors: None, dtype=None):
        tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
        change(tensors)
        names = sorted(tensors)
        parts = [names[: len(names) // 2], names[len(names) // 2 :]] if request.param == "sharded" else [names]
        files = [f"pytorch_model-{n}.bin" if len(parts) > 1 else "pytorch_model.bin" for n in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            held = {name: tensors[name].clone() for name in part}
            torch.save(held, tmp_path / file, _use_new_zipfile_serialization=request.param != "legacy")
        if len(parts) > 1:
            where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
            index = {"metadata": {}, "weight_map": where}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return tmp_path

    return write


def refused(folder, message):
    with pytest.raises(ValueError, match=rf"^model\.path={folder}: {message}") as caught:
        check_model_fits(ModelConfig(path=str(folder)), 2, 8)
    assert "\n" not in str(caught.value)


def test_a_whole_folder_passes_and_its_types_are_known(folder):
    path = folder(dtype=torch.bfloat16)
    check_model_fits(ModelConfig(path=str(path)), 2, 8)
    assert set(tensor_types(path).values()) == {"BF16"}


def test_a_missing_tensor_is_named(folder):
    refused(folder(lambda tensors: tensors.pop(NAME)), f"{NAME} is missing")


def test_a_tensor_of_another_shape_is_named(folder):
    def cut(tensors):
        tensors[NAME] = tensors[NAME][:3].clone()

    refused(folder(cut), rf"{NAME} has shape \[3, \d+\], not")


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("new", [True, False])
def test_other_objects_are_refused_and_not_made(tmp_path, new):
    whole(tiny("llama")).config.save_pretrained(tmp_path)
    held = {"a": Harmful(tmp_path / "made")}
    torch.save(held, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    refused(tmp_path, r"pytorch_model\.bin cannot be read as weights \(it has the Python object _?io\.open\)")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        b"PK\x03\x04" + bytes(100),
        pickle.dumps([1]),
        pickle.dumps({}),
    ],
    ids=["empty", "pointer of git-lfs", "torn archive", "list", "nothing"],
)
def test_a_file_without_weights_is_refused(tmp_path, content):
    whole(tiny("llama")).config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    refused(tmp_path, r"pytorch_model\.bin cannot be read as weights \(")


def test_a_pickle_that_unpacks_to_gigabytes_is_refused_unread(tmp_path):
    whole(tiny("llama")).config.save_pretrained(tmp_path)
    with (
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("archive/data.pkl", "w") as file,
    ):
        for _ in range(110):
            file.write(bytes(1_000_000))
    refused(tmp_path, r"pytorch_model\.bin cannot be read as weights \(a pickle of 110000000 bytes\)")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("target", ["../weights.bin", "/etc/passwd", "a/../../b", 3, None, "..", ["a"]])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, name, target):
    whole(tiny("llama")).config.save_pretrained(tmp_path)
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {NAME: target}}))
    refused(tmp_path, rf"{name}\.index\.json cannot be read \(")


def test_the_files_are_those_that_transformers_takes(tmp_path):
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": {"a": f"part/{name}"}}))
    assert weight_files(tmp_path) == [tmp_path / "part/model.safetensors"]
    (tmp_path / "pytorch_model.bin").touch()
    assert weight_files(tmp_path) == [tmp_path / "part/model.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
