"""A rank's memory of weights, gradients and optimiser state, and the planned memory."""

from __future__ import annotations

from tests.engine.tiny import begun
from weft.conf.schema import WeftConfig


def held_and_predicted(configs: list[WeftConfig]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Bytes after a step of each run, and those of the plan for this pipeline rank."""
    found = []
    for config in configs:
        engine = begun(config)
        engine.train_batch()
        planned = engine.plan.memory[engine.pipe_rank].zero
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.module.parameters()}
        gradients = [bucket._buffer.nbytes for bucket in engine.sharding.buckets]  # kept from step to step
        states = [state for states in engine.optimizer.state.values() for state in states.values()]
        held = {
            "weights": sum(weights.values()),
            "gradients": sum(gradients),
            "optimizer": sum(state.nbytes for state in states if state.dim()),
        }
        found.append((held, {name: getattr(planned, name) for name in held}))
        engine.destroy()
    return found
