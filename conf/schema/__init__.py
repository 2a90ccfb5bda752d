"""The configuration schema: type, default and meaning of every field.

Defaults are written only here, a module for each part.
The classes are not frozen because OmegaConf cannot compose frozen nodes; nothing mutates
them after `weft.conf.load` has converted them to objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.conf.schedule_kinds import PlacementKind as PlacementKind
from weft.conf.schedule_kinds import ScheduleKind as ScheduleKind
from weft.conf.schema.cluster import ClusterConfig as ClusterConfig
from weft.conf.schema.cluster import ClusterManager as ClusterManager
from weft.conf.schema.cluster import CommConfig as CommConfig
from weft.conf.schema.cluster import KubernetesConfig as KubernetesConfig
from weft.conf.schema.cluster import LinkConfig as LinkConfig
from weft.conf.schema.cluster import SiteConfig as SiteConfig
from weft.conf.schema.cluster import SlurmConfig as SlurmConfig
from weft.conf.schema.inference import ControllerConfig as ControllerConfig
from weft.conf.schema.inference import DecodeConfig as DecodeConfig
from weft.conf.schema.inference import EvaluateConfig as EvaluateConfig
from weft.conf.schema.inference import InferenceConfig as InferenceConfig
from weft.conf.schema.inference import KvConnector as KvConnector
from weft.conf.schema.inference import OtherModelConfig as OtherModelConfig
from weft.conf.schema.inference import PrefillConfig as PrefillConfig
from weft.conf.schema.inference import PrefillWorkerConfig as PrefillWorkerConfig
from weft.conf.schema.inference import ScoresConfig as ScoresConfig
from weft.conf.schema.model import Attention as Attention
from weft.conf.schema.model import ChunkedLoss as ChunkedLoss
from weft.conf.schema.model import DataConfig as DataConfig
from weft.conf.schema.model import DataKind as DataKind
from weft.conf.schema.model import Float8 as Float8
from weft.conf.schema.model import Kernels as Kernels
from weft.conf.schema.model import LoraConfig as LoraConfig
from weft.conf.schema.model import ModelConfig as ModelConfig
from weft.conf.schema.model import Quantization as Quantization
from weft.conf.schema.model import SourceConfig as SourceConfig
from weft.conf.schema.parallel import ContextExchange as ContextExchange
from weft.conf.schema.parallel import PairChoice as PairChoice
from weft.conf.schema.parallel import ParallelConfig as ParallelConfig
from weft.conf.schema.parallel import Partition as Partition
from weft.conf.schema.parallel import PipelineConfig as PipelineConfig
from weft.conf.schema.parallel import Recompute as Recompute
from weft.conf.schema.parallel import SplitKind as SplitKind
from weft.conf.schema.parallel import ZeroConfig as ZeroConfig
from weft.conf.schema.supervision import SuperviseConfig as SuperviseConfig
from weft.conf.schema.training import CheckpointConfig as CheckpointConfig
from weft.conf.schema.training import DistillConfig as DistillConfig
from weft.conf.schema.training import ExportDtype as ExportDtype
from weft.conf.schema.training import LoggingConfig as LoggingConfig
from weft.conf.schema.training import LrSchedule as LrSchedule
from weft.conf.schema.training import OptimizerConfig as OptimizerConfig
from weft.conf.schema.training import OptimizerKind as OptimizerKind
from weft.conf.schema.training import OptimizerState as OptimizerState
from weft.conf.schema.training import Precision as Precision
from weft.conf.schema.training import PreferenceConfig as PreferenceConfig
from weft.conf.schema.training import TrainConfig as TrainConfig


@dataclass(kw_only=True)
class WeftConfig:
    """The configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    dry_run: bool = False
    """Print stages, memory, predicted step time and bubbles, and exit before any rank starts."""
