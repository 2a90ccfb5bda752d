"""Fingerprints of the weights that a run starts from. Equal weights have equal fingerprints, wherever they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from weft.conf.schema import ModelConfig
from weft.engine.models.skeleton import hf_model
from weft.engine.stages.files.folder import read_header, weight_files, weights_folder
from weft.engine.stages.files.shards import base_name

WHOLE_BYTES, SAMPLE_BYTES = 1 << 20, 1 << 14
"""Largest size of tensors that are read completely, and the bytes that are read at three positions of larger ones."""


def folder_fingerprint(config: ModelConfig) -> str:
    """Return the fingerprint of the weights of ``model.path``, or an empty string for a new model.

    Only a few kilobytes of each large tensor are read from the files.

    Raises:
        ValueError: the folder has no weights, or their index cannot be read.
    """
    if not config.path:
        return ""
    return _joined(digest for file in weight_files(weights_folder(config.path)) for digest in _digests(file))


def files_fingerprint(files: Iterable[Path]) -> str:
    """Return the fingerprint of files: a hash of their names, their sizes and a few kilobytes of each large file."""
    return _joined(_file_digest(file) for file in files)


def model_fingerprint(model: nn.Module) -> str:
    """Return the fingerprint of a model in memory, or an empty string for a new model that is trained completely.

    Embeddings and adapters do not count, because each process initialises adapters and added embedding vectors
    randomly.
    """
    whole = hf_model(model)
    if not whole.config.name_or_path and all(parameter.requires_grad for parameter in whole.parameters()):
        return ""
    embeddings = [each for each in (whole.get_input_embeddings(), whole.get_output_embeddings()) if each is not None]
    outside = {id(parameter) for each in embeddings for parameter in each.parameters()}
    named = ((base_name(whole, name), parameter) for name, parameter in whole.named_parameters())
    return _joined(_digest(name, _sample(p)) for name, p in named if name is not None and id(p) not in outside)


def _digests(file: Path) -> Iterator[str]:
    """Yield a digest of each tensor of a safetensors file, or one digest of a file in another format."""
    if file.suffix != ".safetensors":
        yield _file_digest(file)
        return
    begin, header = read_header(file)
    with file.open("rb") as stream:
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                kind = f"{name} {entry['dtype']} {entry['shape']}"
                ranges = ((begin + start + a, begin + start + b) for a, b in _ranges(stop - start))
                yield _digest(kind, (_read(stream, a, b) for a, b in ranges))


def _file_digest(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        return _digest(f"{file.name} {size}", (_read(stream, start, stop) for start, stop in _ranges(size)))


def _read(stream: BinaryIO, start: int, stop: int) -> bytes:
    stream.seek(start)
    return stream.read(stop - start)


def _sample(tensor: Tensor) -> Iterator[bytes]:
    flat = tensor.detach().flatten()
    for start, stop in _ranges(flat.numel() * flat.itemsize):
        part = flat[start // flat.itemsize : stop // flat.itemsize].contiguous()
        yield part.cpu().view(torch.uint8).numpy().tobytes()


def _ranges(size: int) -> Iterator[tuple[int, int]]:
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    middle = size // 2 - size // 2 % SAMPLE_BYTES
    for start in (0, middle, size - SAMPLE_BYTES):
        yield start, start + SAMPLE_BYTES


def _digest(name: str, parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _joined(digests: Iterable[str]) -> str:
    return hashlib.blake2b("".join(sorted(digests)).encode(), digest_size=16).hexdigest()
