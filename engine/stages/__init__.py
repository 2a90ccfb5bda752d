"""Hugging Face models as virtual pipeline stages."""

from weft.engine.stages.axis_check import check_axes
from weft.engine.stages.batch import Batch
from weft.engine.stages.checking import check_flash_packing, check_packing, self_check
from weft.engine.stages.exporting import export_stages, rehearse_export
from weft.engine.stages.from_model import stages_from_model
from weft.engine.stages.loading import build_model, check_model_fits, load_hf_config, load_stages
from weft.engine.stages.outline import Outline, outline_of
from weft.engine.stages.refusals import refuse_packing, refuse_partitioning
from weft.engine.stages.split import StageSplit, split_layers
from weft.engine.stages.stage import Stage, tied_names

__all__ = [
    "Batch",
    "Outline",
    "Stage",
    "StageSplit",
    "build_model",
    "check_axes",
    "check_flash_packing",
    "check_model_fits",
    "check_packing",
    "export_stages",
    "load_hf_config",
    "load_stages",
    "outline_of",
    "refuse_packing",
    "refuse_partitioning",
    "rehearse_export",
    "self_check",
    "split_layers",
    "stages_from_model",
    "tied_names",
]
