"""Save and restore the state that a rank's optimiser holds for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.engine.checkpoint.durable import CheckpointError, OtherModelError
from weft.engine.checkpoint.pieces import Piece, share, stored_name
from weft.engine.checkpoint.reader import Checkpoint
from weft.engine.zero import Fragment, ShardedOptimizer

WEIGHT, OPTIM = "weight", "optim"
"""Kinds of tensors: ``weight/NAME`` in the highest existing precision, ``optim/KEY/NAME``."""
OF_SCHEDULE, OF_STATE = ("lr", "initial_lr"), ("step",)
"""Entries of an optimiser's parameter group in a checkpoint: those of a schedule, and those of steps."""
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of a loss scaler that changes during training."""


# -- saving ------------------------------------------------------------------------------------


def collect(
    held: Iterable[Fragment], optimizer: Optimizer, buffers: Iterable[Piece], shares: Callable[[str], tuple[int, int]]
) -> list[Piece]:
    """Return this rank's pieces: its own fragments, and its share of the state that all of its replicas hold.

    Nothing is gathered. Each replica writes about the same number of bytes, and the pieces of all replicas cover each
    tensor.

    Args:
        held: fragments of the parameters that this rank's stages write.
        buffers: tensors that no optimiser updates.
        shares: takes the axis that cuts a parameter, or "" if none does. Returns this rank's index among the ranks
            with the same part, and their number.
    """
    own: list[Piece] = []
    alike: dict[str, list[Piece]] = {"": list(buffers)}
    for fragment in held:
        axis = "" if fragment.cut is None else fragment.cut.axis
        (alike.setdefault(axis, []) if fragment.shared else own).extend(_pieces(fragment, optimizer))
    return own + [piece for axis, pieces in alike.items() for piece in share(pieces, *shares(axis))]


def _pieces(fragment: Fragment, optimizer: Optimizer) -> Iterator[Piece]:
    shape = tuple(fragment.parameter.shape)
    yield Piece(stored_name(f"{WEIGHT}/{fragment.name}", fragment.cut), shape, fragment.start, fragment.tensor)
    for key, value in optimizer.state.get(fragment.tensor, {}).items() if fragment.trained else ():
        name = f"{OPTIM}/{key}/{fragment.name}"
        if isinstance(value, Tensor) and value.shape == fragment.tensor.shape and value.ndim > 0:
            yield Piece(stored_name(name, fragment.cut), shape, fragment.start, value.detach())
        elif block := _blocks(optimizer).get(key):
            count = -(-fragment.parameter.numel() // block)
            yield Piece(stored_name(name, fragment.cut), (count,), fragment.start // block, value.detach())
        elif fragment.start == 0 and (
            fragment.cut is None or fragment.cut.index == 0
        ):  # one number for the whole parameter, such as Adam's step count
            value = torch.as_tensor(value)
            if value.numel() > 1 and not (fragment.is_whole and fragment.cut is None):
                raise CheckpointError(
                    f"{name}: shape {tuple(value.shape)} belongs to no single parameter; choose another "
                    "optimizer.kind, or train with zero.stage=0"
                )
            yield Piece.whole(name, value)


def _blocks(optimizer: Optimizer) -> Mapping[str, int]:
    """Return the elements of a block for each key of state that has one element for each block."""
    return getattr(optimizer, "state_blocks", {})


def group_scalars(held: Iterable[Fragment], optimizer: Optimizer) -> dict[str, dict[str, float]]:
    """Return the learning rate and other scalars of each parameter's group, by parameter name."""
    values: dict[Tensor, dict[str, float]] = {}
    for group in optimizer.param_groups:
        scalars = {key: float(group[key]) for key in OF_SCHEDULE + OF_STATE if key in group}
        values |= dict.fromkeys(group["params"], scalars)
    return {fragment.name: values[fragment.tensor] for fragment in held if fragment.trained}


def loss_scale(optimizer: ShardedOptimizer) -> dict[str, float]:
    """Return the state of the dynamic loss scaler, or an empty dictionary if there is none."""
    scaler = optimizer.loss_scaler
    return {key: getattr(scaler, key) for key in _LOSS_SCALE if scaler.dynamic and hasattr(scaler, key)}


# -- restoring ---------------------------------------------------------------------------------


def restore(held: Iterable[Fragment], optimizer: Optimizer, checkpoint: Checkpoint, *, with_state: bool = True) -> None:
    """Read this rank's fragments from a checkpoint. `Sharding.publish` must follow.

    Args:
        with_state: also restore the optimiser's state. Otherwise it is unchanged.

    Raises:
        CheckpointError: the checkpoint is damaged. `OtherModelError` if it belongs to another model.
    """
    held = list(held)
    has_state = with_state and any(name.startswith(f"{OPTIM}/") for name in checkpoint.names)
    if has_state:
        _make_state(optimizer)
    elif with_state:
        optimizer.state.clear()
    keys = _state_keys(checkpoint)
    for fragment in held:
        name = f"{WEIGHT}/{fragment.name}"
        shape = fragment.shape
        if name not in checkpoint.names:
            raise OtherModelError(
                f"{checkpoint.path}: it lacks the model's {fragment.name}; give the model and lora settings with "
                "which the checkpoint was written"
            )
        if checkpoint.shape(name) != shape:
            raise OtherModelError(
                f"{checkpoint.path}: {fragment.name} has shape {checkpoint.shape(name)}, the model's has {shape}; "
                "give the model's settings with which the checkpoint was written"
            )
        _fill(fragment, fragment.tensor, checkpoint, name)
        if fragment.trained and has_state:
            _restore_state(fragment, optimizer, checkpoint, keys.get(fragment.name, ()))


def _state_keys(checkpoint: Checkpoint) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for name in checkpoint.names:
        kind, _, rest = name.partition("/")
        if kind == OPTIM:
            key, _, parameter = rest.partition("/")
            keys.setdefault(parameter, []).append(key)
    return keys


@torch.no_grad()
def _fill(fragment: Fragment, target: Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Copy the fragment's part of a stored tensor to ``target``, which has the fragment's shape."""
    elements = checkpoint.read(name, fragment.start, fragment.start + target.numel(), fragment.cut)
    target.copy_(elements.view(target.shape))


def _restore_state(fragment: Fragment, optimizer: Optimizer, checkpoint: Checkpoint, keys: Collection[str]) -> None:
    if not keys:
        optimizer.state.pop(fragment.tensor, None)  # it was saved before its first step
        return
    state = optimizer.state[fragment.tensor]
    for key in keys:
        name = f"{OPTIM}/{key}/{fragment.name}"
        if key not in state:
            raise CheckpointError(
                f"{checkpoint.path}: the optimiser saved {key!r}, which {type(optimizer).__name__} "
                "does not have; resume with the same optimizer.kind"
            )
        value = state[key]
        if isinstance(value, Tensor) and value.shape == fragment.tensor.shape and value.ndim > 0:
            _fill(fragment, value, checkpoint, name)
        elif block := _blocks(optimizer).get(key):
            first = fragment.start // block
            value.copy_(checkpoint.read(name, first, first + value.numel()))
        elif isinstance(value, Tensor):
            value.copy_(checkpoint.read(name).view(value.shape))
        else:
            state[key] = type(value)(checkpoint.read(name).item())


def _make_state(optimizer: Optimizer) -> None:
    """Let the optimiser create its state, by a step with learning rate 0 and zero gradients."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    missing = [tensor for tensor in tensors if not optimizer.state.get(tensor)]
    if missing:
        with _no_motion(optimizer), _gradients(tensors, {id(tensor) for tensor in missing}):
            optimizer.step()


@contextmanager
def _no_motion(base: Optimizer) -> Iterator[None]:
    rates = [group["lr"] for group in base.param_groups]
    for group in base.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(base.param_groups, rates, strict=True):
            group["lr"] = rate


@contextmanager
def _gradients(owners: Iterable[Tensor], chosen: set[int]) -> Iterator[None]:
    """Set the gradients of the chosen tensors to zero and the others to None, and restore all at the end."""
    kept = [(owner, owner.grad) for owner in owners]
    for owner, _ in kept:
        owner.grad = torch.zeros_like(owner) if id(owner) in chosen else None
    try:
        yield
    finally:
        for owner, gradient in kept:
            owner.grad = gradient


def restore_step_counts(
    held: Iterable[Fragment], optimizer: Optimizer, saved: Mapping[str, Mapping[str, float]]
) -> None:
    """Set the step counts that an optimiser stores per parameter group to the saved values of their parameters."""
    of_tensor = {id(fragment.tensor): saved.get(fragment.name, {}) for fragment in held if fragment.trained}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            for key, value in of_tensor.get(id(tensor), {}).items():
                if key in OF_STATE:
                    set_scalar(group, key, int(value))


def set_scalar(group: dict[str, Any], key: str, value: float) -> None:
    """Set a number of a parameter group, in place if it is a tensor."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def restore_loss_scale(optimizer: ShardedOptimizer, saved: Mapping[str, float]) -> None:
    """Restore the loss scaler's state, if there is a scaler and a saved state."""
    scaler = optimizer.loss_scaler
    for key, value in saved.items() if scaler.dynamic else ():
        if hasattr(scaler, key):
            setattr(scaler, key, value)
