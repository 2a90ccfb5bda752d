"""The pieces in which ZeRO's optimisers step a model's weights, of which some store state by their size or shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from torch import nn
from transformers import PreTrainedModel

from weft.conf.schema import ZeroConfig
from weft.engine.layout import RankLayout
from weft.engine.models.hidden_matrices import is_hidden_matrix, longest_share
from weft.engine.models.sizes import divided_parameters
from weft.engine.models.skeleton import decoder_layers, hf_model
from weft.engine.parallel.cut import Cut
from weft.pipeline.memory import ALIGNMENT, INT8_BYTES, OPTIMIZER_BYTES, has_int8_state

Shape = tuple[int, ...]
COARSE, GRAIN = 2**14, 2**12
"""Pieces of more elements count as the next multiple of `GRAIN`, so that few shapes have to be measured."""
Named = tuple[int, str, nn.Parameter]
"""The part of the model, and a parameter with its name. Parts are the embedding, each layer, and the norm and head."""


def stepped_pieces(model: nn.Module, zero: ZeroConfig, layout: RankLayout) -> Counter[tuple[int, Shape]]:
    """Return the number of weights by part of the model and by the shape in which an optimiser steps them.

    It counts the pieces of all replicas. Stages have equally many layers, and buckets end at their largest size.

    Args:
        model: the whole model on the meta device, with adapters.
    """
    found: Counter[tuple[int, Shape]] = Counter()
    cuts = _cuts(model, layout)
    for group in _bucket_groups(model, zero, layout):
        for is_cut in (False, True):
            run = [named for named in group if (named[1] in cuts) == is_cut]
            holders = (layout.data_ranks if is_cut else layout.lines) if zero.stage else 1
            for part, shape, count in _divided(run, holders, zero, cuts):
                found[part, shape] += count
    return found


def _cuts(model: nn.Module, layout: RankLayout) -> Mapping[str, Cut]:
    whole = hf_model(model)
    return divided_parameters(whole, decoder_layers(whole), tensor=layout.tensor, expert=layout.expert)


def _bucket_groups(model: nn.Module, zero: ZeroConfig, layout: RankLayout) -> Iterator[list[Named]]:
    """Yield the parameters that may share buckets, of all pipeline stages, if each has equally many layers."""
    whole = hf_model(model)
    before, layers, behind, head = _parts(whole, decoder_layers(whole))
    shared = {name for _, name, _ in before} & {name for _, name, _ in head}
    ends = [len(layers) * stage // layout.stages for stage in range(layout.stages + 1)]
    for stage, (first, stop) in enumerate(pairwise(ends)):
        is_last = stage == layout.stages - 1
        outside = [*(before if stage == 0 else ()), *(behind if is_last else ())]
        blocks = [outside, *layers[first:stop], head if is_last and not (shared and stage == 0) else []]
        apart = shared if layout.stages > 1 else set()  # holders of shared weights divide them alike
        yield from _groups([[named for named in block if named[1] not in apart] for block in blocks], zero)
        yield from ([named] for block in blocks for named in block if named[1] in apart)


def matrix_padding(model: nn.Module, zero: ZeroConfig, layout: RankLayout) -> float:
    """Return the number of elements by which the shards of a replica are padded, because matrices stay whole."""
    limit, padding = min(zero.reduce_bucket_size, zero.allgather_bucket_size), 0.0
    for group in _bucket_groups(model, zero, layout) if zero.stage else ():
        bucket: list[nn.Parameter] = []
        for parameter in [*(p for _, name, p in group if is_hidden_matrix(name, p)), None]:
            if bucket and (parameter is None or sum(p.numel() for p in [*bucket, parameter]) > limit):
                padding += longest_share([p.shape for p in bucket], layout.lines)
                padding -= sum(p.numel() for p in bucket) / layout.lines
                bucket = []
            if parameter is not None:
                bucket.append(parameter)
    return padding


def muon_bytes(model: nn.Module) -> tuple[float, ...]:
    """Return the bytes of Muon's state per trained weight: of the embedding, of each layer, and of what follows them.

    Muon stores one moment of a hidden matrix, and Adam's two of any other parameter.
    """
    return _mean_bytes(model, lambda name, p: OPTIMIZER_BYTES / 2 if is_hidden_matrix(name, p) else OPTIMIZER_BYTES)


def int8_bytes(model: nn.Module) -> tuple[float, ...]:
    """Return the bytes of AdamW's state with 8-bit moments per trained weight, as `muon_bytes` does."""
    return _mean_bytes(model, lambda _, p: INT8_BYTES if has_int8_state(p.numel()) else OPTIMIZER_BYTES)


def _mean_bytes(model: nn.Module, bytes_of: Callable[[str, nn.Parameter], float]) -> tuple[float, ...]:
    """Return the mean over the weights of each part of the model."""
    whole = hf_model(model)
    before, layers, behind, head = _parts(whole, decoder_layers(whole))
    parts = [before, *layers, [*behind, *head]]
    stored = [sum(p.numel() * bytes_of(name, p) for _, name, p in part) for part in parts]
    totals = [sum(p.numel() for _, _, p in part) for part in parts]
    return tuple(num_bytes / max(total, 1) for num_bytes, total in zip(stored, totals, strict=True))


def _parts(model: PreTrainedModel, path: str) -> tuple[list[Named], list[list[Named]], list[Named], list[Named]]:
    """Return the trained parameters before the layers, of each layer, behind them, and of the head."""
    output = model.get_output_embeddings()
    of_head = set() if output is None else set(output.parameters())
    of_embedding = set(model.get_input_embeddings().parameters())
    count = len(list(model.get_submodule(path).children()))
    before, layers, behind, head = list[Named](), [list[Named]() for _ in range(count)], list[Named](), list[Named]()
    has_passed = False
    for name, parameter in model.named_parameters():
        is_inside = name.startswith(f"{path}.")
        has_passed |= is_inside
        if not parameter.requires_grad:
            continue
        if is_inside:
            number = int(name[len(path) + 1 :].partition(".")[0])
            layers[number].append((number + 1, name, parameter))
        elif parameter not in of_head:
            (behind if has_passed else before).append((count + 1 if has_passed else 0, name, parameter))
        else:
            head.append((count + 1, name, parameter))
            if parameter in of_embedding:
                before.append((0, name, parameter))
    return before, layers, behind, head


def _groups(blocks: Sequence[list[Named]], zero: ZeroConfig) -> Iterator[list[Named]]:
    """Yield groups of parameters that may share buckets; see `weft.engine.zero.division.divide`."""
    if zero.stage < 3:
        yield [named for block in blocks for named in block]
        return
    room, kept = zero.model_persistence_threshold, []
    for named in (named for block in blocks for named in block):
        if named[2].numel() < zero.param_persistence_threshold and named[2].numel() <= room:
            room -= named[2].numel()
            kept.append(named)
    yield kept
    names = {name for _, name, _ in kept}
    for block in blocks:
        yield [named for named in block if named[1] not in names]


def _divided(
    group: Iterable[Named], holders: int, zero: ZeroConfig, cuts: Mapping[str, Cut]
) -> Iterator[tuple[int, Shape, int]]:
    """Yield the part, the shape and the number of weights of each piece of a group's parameters."""
    limit, run, used = min(zero.reduce_bucket_size, zero.allgather_bucket_size), list[tuple[Named, int]](), 0
    for named in [*group, None]:
        count = 0 if named is None else cuts[named[1]].num_elements if named[1] in cuts else named[2].numel()
        if run and (named is None or used + count > limit):
            share = -(-used // (holders * ALIGNMENT)) * ALIGNMENT
            offset = 0
            for (part, _, parameter), size in run:
                ends = [offset, *range((offset // share + 1) * share, offset + size, share), offset + size]
                for begin, end in pairwise(ends):
                    piece = end - begin
                    flat = piece if piece <= COARSE else -(-piece // GRAIN) * GRAIN
                    yield part, tuple(parameter.shape) if piece == size else (flat,), piece
                offset += size
            run, used = [], 0
        if named is not None:
            run.append((named, count))
            used += count
