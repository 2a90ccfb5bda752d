"""Centauri's three tiers of overlap (section 3.2), operation, layer and model, as pure functions of costs.

Names are the paper's in lower case. Costs are in seconds, or in any other common unit.
"""

from weft.pipeline.tiers.layer import LayerCosts, LayerPlan, layer_tier
from weft.pipeline.tiers.model import ModelCosts, ModelPlan, model_tier
from weft.pipeline.tiers.operation import OperationCosts, OperationPlan, operation_tier

__all__ = [
    "LayerCosts",
    "LayerPlan",
    "ModelCosts",
    "ModelPlan",
    "OperationCosts",
    "OperationPlan",
    "layer_tier",
    "model_tier",
    "operation_tier",
]
