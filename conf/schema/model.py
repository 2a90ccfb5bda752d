"""The model and its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from weft.conf.schema.ranges import COUNT, NATURAL, POSITIVE, SHARE, Range


class Attention(Enum):
    """Attention kernel, by Hugging Face's name, and torch's varlen_attn."""

    eager = "eager"
    sdpa = "sdpa"
    flex_attention = "flex_attention"
    varlen = "varlen"
    flash_attention_2 = "flash_attention_2"
    flash_attention_3 = "flash_attention_3"
    flash_attention_4 = "flash_attention_4"

    @property
    def is_flash(self) -> bool:
        """True for flash attention of a package that transformers calls."""
        return self.value.startswith("flash_attention")


class ChunkedLoss(Enum):
    """When the loss is computed in chunks of logits."""

    auto = "auto"
    always = "always"
    never = "never"


class Kernels(Enum):
    """Kernels of norms, rotary embeddings and gated MLPs."""

    none = "none"
    fused = "fused"


class Float8(Enum):
    """Recipes of torchao for linear layers in fp8."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"
    rowwise_with_gw_hp = "rowwise_with_gw_hp"


class DataKind(Enum):
    """Kind of training data."""

    corpus = "corpus"
    text = "text"
    chat = "chat"
    preference = "preference"

    @property
    def sequences(self) -> int:
        """Number of sequences that one document makes."""
        return 2 if self is DataKind.preference else 1


class Quantization(Enum):
    """4-bit type of bitsandbytes."""

    none = "none"
    nf4 = "nf4"
    fp4 = "fp4"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters through peft."""

    enabled: bool = False
    """Train only the adapters."""
    rank: Annotated[int, COUNT] = 8
    """Rank of the update matrices."""
    alpha: Annotated[float, POSITIVE] = 16.0
    """Scale of the update: alpha / rank."""
    dropout: Annotated[float, SHARE] = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] = field(default_factory=list)
    """Modules that get an adapter; [all-linear] is each nn.Linear but the output's; empty lets peft choose."""
    quantize: Quantization = Quantization.none
    """Type of the base model's linear layers, except the output's: none, or nf4 or fp4 with 4 bits (QLoRA; needs
    bitsandbytes). A folder whose weights have 4 bits already needs none."""
    double_quantize: bool = True
    """Quantise the scales of 4-bit weights, too, to 8 bits."""


@dataclass(kw_only=True)
class ModelConfig:
    """The Hugging Face model."""

    path: str = ""
    """Local folder or hub name; empty builds a new model from `arch` and `overrides`."""
    arch: str = "llama"
    """`model_type` of a new model, as in a Hugging Face config.json."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config fields to override, for new and loaded models. With `path` on the command line, a recipe's
    that describe a new model are left out."""
    parallel_block: bool = False
    """Compute attention and MLP of each layer from the same input (MegaScale 3.1); a new model of an `arch` that does
    so, such as cohere2 or gpt_neox. false leaves it to the `arch`."""
    sliding_window: Annotated[int, NATURAL] = 0
    """Tokens to which a token attends, itself included, in layers with a window; a new model of an `arch` with such
    layers, such as cohere2, mistral or qwen3. 0 leaves it to the `arch`."""
    tokenizer: str = ""
    """Tokenizer folder or hub name; empty uses `path`, or trains a tokenizer on the embedded corpus."""
    attn_implementation: Attention = Attention.sdpa
    """Attention kernel: eager, sdpa, and on GPUs also varlen (torch's flash attention over documents, bf16 or fp16),
    flex_attention, and flash_attention_2, _3 and _4 (packages of their own)."""
    kernels: Kernels = Kernels.none
    """fused: norms, rotary embeddings and gated MLPs as kernels of Liger-Kernel (needs it, Triton and a GPU)."""
    float8: Float8 = Float8.none
    """Linear layers of decoder layers in fp8 by a recipe of torchao, which it needs, on GPUs from compute capability
    8.9. tensorwise: one scale per tensor, of a rank's part; rowwise: one per row; rowwise_with_gw_hp: so, with weight
    gradients in bf16. Routers, fused experts, adapters and sizes that are not multiples of 16 stay in bf16."""
    chunked_loss: ChunkedLoss = ChunkedLoss.auto
    """When the loss is computed in chunks of logits, which then never exist as a whole, but are computed once more for
    the head's weight gradient: auto (if memory does not suffice without), always, or never. Custom losses, and heads
    other than a plain nn.Linear, always need whole logits."""
    loss_chunk_mb: Annotated[float, POSITIVE] = 128.0
    """Size of a chunk of logits in MB in fp32; micro-batches with fewer logits are not divided."""
    self_check: bool = True
    """Before training, compare a shrunken copy of the staged model with Hugging Face's own forward."""
    trust_remote_code: bool = False
    """Run the modelling code that comes with the model's folder or hub repository."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""


@dataclass(kw_only=True)
class SourceConfig:
    """A source of a mixture. An empty setting takes the value of the same setting in `data`."""

    path: str = ""
    """Hub name, folder, or file, as in `data.path`."""
    weight: float = 1.0
    """Share of the tokens, relative to the weights of the other sources that are not exhausted."""
    epochs: int = 0
    """Passes over the source, after which the others continue without it; 0 repeats it as long as training lasts.
    If every source is limited, the mixture begins again after the last one has ended."""
    name: str = ""
    """Configuration name of a hub dataset."""
    split: str = ""
    """Split of a hub dataset."""
    eval_split: str = ""
    """Split used for evaluation."""
    text_field: str = ""
    """Field with the text of a document."""
    messages_field: str = ""
    """Field with the messages of a conversation."""


@dataclass(kw_only=True)
class DataConfig:
    """Where batches come from."""

    kind: DataKind = DataKind.corpus
    """corpus: the embedded standard-library text; text: plain documents; chat: conversations; preference: prompts
    (`prompt`) with a `chosen` and a `rejected` answer, as texts or lists of messages, for direct preference
    optimisation. Without `prompt` it is what both answers begin with."""
    path: str = ""
    """Hub name, folder, file (.parquet, or .jsonl/.json/.csv/.tsv/.txt, also as .gz/.bz2/.xz), WebDataset shard (.tar),
    or a URL or pattern of files that fsspec opens, as in s3://bucket/folder; unused for the embedded corpus."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources instead of `path`, mixed by their weights. The order depends only on the data and the seed."""
    name: str = ""
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    eval_split: str = ""
    """Split used for evaluation; empty holds out `eval_fraction` of the training data."""
    eval_fraction: Annotated[float, SHARE] = 0.0
    """Fraction of documents held out for evaluation when `eval_split` is empty."""
    text_field: str = "text"
    """Field with the text of a document."""
    messages_field: str = "messages"
    """Field with the list of {role, content} messages of a conversation, or {from, value} as in ShareGPT. Rows
    without `messages` may have `conversations`, `prompt` and `completion`, or `instruction`, `input` and `output`.
    The chat template gets all keys of the messages, and the schemas in a column `tools`."""
    chat_template: str = ""
    """Jinja chat template, or a file with one, which the export gets, too; empty uses the tokenizer's."""
    streaming: bool = False
    """Read the data during training instead of loading it first; shuffle within a buffer."""
    shuffle: bool = True
    """Shuffle documents, differently in each epoch."""
    shuffle_buffer: Annotated[int, COUNT] = 10_000
    """Documents in the shuffle buffer of a streamed source."""
    sequence_length: Annotated[int, Range(2)] = 256
    """Tokens per sequence."""
    packing: bool = True
    """Pack several documents into each sequence; position ids restart at each document."""
    cache_dir: str = "~/.cache/weft"
    """Folder for tokenised data, the embedded corpus's tokenizer, and measurements of devices and collectives."""
