"""The data pipeline: documents to micro-batches, in a global order that does not depend on the number of replicas."""

from weft.engine.data.chat import with_template
from weft.engine.data.check import Seen, check_source, require_encodable, require_parts
from weft.engine.data.host_loader import HostLoader, Stream
from weft.engine.data.loader import Batch, MicrobatchLoader, build_loader
from weft.engine.data.open import encode_first, open_source
from weft.engine.data.source import Source
from weft.engine.data.tokenizer import load_tokenizer, vocabulary_for
from weft.engine.data.unused import unused_lines
from weft.engine.models.batch import count_label_tokens
from weft.engine.stages.checking.refusals import refuse_packing

__all__ = [
    "Batch",
    "HostLoader",
    "MicrobatchLoader",
    "Seen",
    "Source",
    "Stream",
    "build_loader",
    "check_source",
    "count_label_tokens",
    "encode_first",
    "load_tokenizer",
    "open_source",
    "refuse_packing",
    "require_encodable",
    "require_parts",
    "unused_lines",
    "vocabulary_for",
    "with_template",
]
