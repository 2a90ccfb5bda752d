"""Prefill serving in bubbles."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from weft.conf.schema.ranges import COUNT, NATURAL, POSITIVE, Range


class KvConnector(Enum):
    """The transport of KV caches from prefill workers to decode instances."""

    none = "none"
    nixl = "nixl"
    wan = "wan"


@dataclass(kw_only=True)
class PrefillWorkerConfig:
    """A running prefill worker, as the controller reaches it."""

    url: str = ""
    """URL of the worker's HTTP server, such as http://127.0.0.1:8001."""
    boards: list[str] = field(default_factory=list)
    """Bubble boards of the ranks whose devices the worker uses; it computes only while all of them idle. Empty for a
    worker of `weft serve` on another host, which reports its bubbles and costs."""
    stages: Annotated[int, Range(1, 64)] = 1
    """Pipeline stages of the worker, each on as many of the ranks, in the order of `boards`. Each computes only while
    its own ranks idle."""
    cost: str = ""
    """File with the worker's cost model; empty predicts with a cautious prior. Those of later stages lie next to it."""
    decode_url: str = ""
    """URL of the decode server near the worker, such as one at its site. It answers the prompts that the worker
    computes; empty leaves them to `inference.decode`."""


@dataclass(kw_only=True)
class OtherModelConfig:
    """A model that another OpenAI server serves, such as the controller of another `weft serve`."""

    name: str = ""
    """Name of the model in requests."""
    url: str = ""
    """URL of the server, such as http://127.0.0.1:8500."""
    api_key_env: str = ""
    """Environment variable with the server's API key; empty if it needs none."""


@dataclass(kw_only=True)
class ControllerConfig:
    """The HTTP service in front of the prefill workers."""

    host: str = "127.0.0.1"
    """Address to listen on; any address that other machines can reach needs an API key."""
    port: Annotated[int, Range(0, 65535)] = 8300
    """Port to listen on."""
    api_key_env: str = "WEFT_API_KEY"
    """Environment variable with the API key that callers send as `Authorization: Bearer KEY`; it is
    also sent to the workers."""
    clients: str = ""
    """YAML file (mode 600) of further clients, each with a key and limits, as in `alice: {key: SECRET,
    requests_per_minute: 60, tokens_per_minute: 100000, at_once: 8}`. Limits may be left out. Changes of the file hold
    at once."""
    ssl_certfile: str = ""
    """Certificate chain in PEM, for HTTPS; empty serves HTTP."""
    ssl_keyfile: str = ""
    """Private key of the certificate in PEM, without a passphrase; empty expects it in `ssl_certfile`."""
    workers: list[PrefillWorkerConfig] = field(default_factory=list)
    """Running workers to use; empty uses those that `weft serve` starts."""
    models: list[OtherModelConfig] = field(default_factory=list)
    """Other models, whose requests are forwarded to their servers."""
    tokenizer: str = ""
    """tokenizer.json of the served model, or its folder, to count prompt tokens; empty uses the one in
    `inference.prefill.model`, or estimates the count from the text's length if there is none."""
    deadline_s: Annotated[float, POSITIVE] = 10.0
    """Seconds in which a prompt has to be computed. A request that is predicted to take longer is refused; with a
    decode server, that server computes the prompt instead. The request header X-Weft-Deadline-S overrides it."""
    max_prompt_tokens: Annotated[int, COUNT] = 131_072
    """Longest prompt that is accepted."""
    max_body_bytes: Annotated[int, COUNT] = 4_194_304
    """Largest request body that is accepted."""
    max_json_depth: Annotated[int, COUNT] = 32
    """Deepest JSON nesting of a request body that is accepted."""
    max_queue: Annotated[int, COUNT] = 64
    """Largest number of unanswered requests on one worker."""
    max_connections: Annotated[int, COUNT] = 1024
    """Largest number of requests in progress. Of more connections, the oldest without a request are closed."""
    receive_timeout_s: Annotated[float, POSITIVE] = 10.0
    """Seconds that a client has to send its request."""
    send_timeout_s: Annotated[float, POSITIVE] = 60.0
    """Seconds after which a client that reads nothing of its response is disconnected."""
    answer_slack_s: Annotated[float, POSITIVE] = 5.0
    """Seconds past the expected end of a prompt after which the controller starts to check the worker's
    health; the worker keeps its prompts as long as it answers."""
    silence_s: Annotated[float, POSITIVE] = 30.0
    """Seconds without any answer after which a worker or decode server counts as hung. A dead one refuses
    connections, which is noticed at once."""
    answer_timeout_s: Annotated[float, POSITIVE] = 600.0
    """Seconds after which a prompt, an answer that is not streamed, or the next event of a stream is abandoned even if
    its server is alive."""
    probe_s: Annotated[float, POSITIVE] = 0.5
    """Seconds between probes of each worker's health and bubbles."""
    drain_s: Annotated[float, POSITIVE] = 30.0
    """Seconds that accepted requests have to end after SIGTERM."""


@dataclass(kw_only=True)
class PrefillConfig:
    """The prefill workers: stock vLLM servers on the devices of a host's training ranks."""

    model: str = ""
    """Model to serve: Hugging Face folder or hub name, as vLLM takes it."""
    python: str = ""
    """Python interpreter that has vLLM; empty uses the one that runs `weft serve`."""
    ranks: list[int] = field(default_factory=list)
    """Training ranks of this host whose bubbles serve prefill; empty means all of `cluster.ranks`. With workers whose
    `stages` are on several hosts of a hostfile: of all hosts."""
    ranks_per_worker: Annotated[int, COUNT] = 1
    """Ranks whose devices one worker spans as its tensor-parallel group; it runs while all of them
    are in a bubble. To span them one after the other instead, see `stages`."""
    stages: Annotated[int, Range(1, 64)] = 1
    """Pipeline stages that the model is cut into; each rank of a worker has one, and computes it in its own bubbles.
    So a rank gives up a fraction of the memory of a whole worker. Neighbouring ranks form a worker: the same
    pipeline position in a DP-cell, if it has that many pipelines."""
    host: str = "127.0.0.1"
    """Address for the workers to listen on; any address that other machines can reach needs an API key."""
    first_port: Annotated[int, Range(1024, 65535)] = 8301
    """Port of the first worker; the others follow."""
    first_side_port: Annotated[int, Range(1024, 65535)] = 5600
    """Side-channel port of the first worker's NIXL connector, for decode instances; the others follow."""
    first_stage_port: Annotated[int, Range(1024, 65535)] = 5800
    """Port on which a host's first rank listens if it is a stage of another host's worker; the others follow."""
    memory_share: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.1
    """Fraction of a GPU's memory that a worker reserves at its start for weights, KV cache and about a
    gigabyte more; an 8 B model in bf16 has 16 GB of weights, so 0.25 of an 80 GB GPU. Training must
    leave that much free; `weft serve` checks both before it starts a worker."""
    kv_cache_bytes: Annotated[int, COUNT] = 268_435_456
    """KV cache of a worker on a CPU; on a GPU it follows from `memory_share`."""
    max_tokens: Annotated[int, COUNT] = 4096
    """Longest prompt, and longest prefill chunk, in tokens."""
    guard_s: Annotated[float, NATURAL] = 0.003
    """Seconds to keep free at the end of each bubble, before training is expected back."""
    quantile: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.98
    """Fraction of prefill steps that should end within their prediction; the others run into the guard."""
    connector: KvConnector = KvConnector.none
    """How to send KV caches: none, nixl (vLLM's NIXL connector, with a quiet progress thread), or for links between
    sites wan: from host memory over many TCP connections, authenticated by WEFT_KEY and encrypted. All servers have
    the same."""
    cache_mbps: Annotated[float, NATURAL] = 0.0
    """Megabits per second at which a worker sends caches over the WAN at most, so that the rest is training's; 0 for no
    limit. Prompts whose caches would arrive late by it are not placed on workers at other sites."""
    yield_cores: bool = True
    """On a CPU, run only on otherwise idle cores (SCHED_IDLE). False lets a worker compete for cores
    inside bubbles; otherwise it would never run on a host that other jobs keep busy."""
    allow_decode: bool = False
    """Also decode on the workers, instead of refusing requests for more than one token."""
    cost_dir: str = "~/.cache/weft/prefill"
    """Folder that keeps the cost model of each model and machine between runs."""
    arguments: list[str] = field(default_factory=list)
    """Additional arguments for the vLLM server."""


@dataclass(kw_only=True)
class DecodeConfig:
    """The server that decodes: a stock vLLM server, which fetches KV caches from the prefill workers."""

    enabled: bool = False
    """Let `weft serve` start a decode server and the controller as well, whose address then gives whole answers;
    `weft serve --with-decode` sets it, and `inference.prefill.connector`."""
    url: str = ""
    """URL of a running decode server, such as http://10.0.0.2:8400; empty starts one on this host."""
    gpus: list[str] = field(default_factory=list)
    """GPUs of the decode server, as CUDA_VISIBLE_DEVICES names them, on which no rank trains; empty uses the CPU."""
    port: Annotated[int, Range(1024, 65535)] = 8400
    """Port of its HTTP server, on 127.0.0.1."""
    side_port: Annotated[int, Range(1024, 65535)] = 5700
    """Port of its NIXL connector's side channel."""
    kv_cache_bytes: Annotated[int, COUNT] = 268_435_456
    """KV cache of a decode server on a CPU; on GPUs vLLM takes what is free."""
    arguments: list[str] = field(default_factory=list)
    """Additional arguments for the vLLM server. Its number format must be the workers', as in [--dtype, float32]."""


@dataclass(kw_only=True)
class EvaluateConfig:
    """Evaluation of a run's checkpoints by its prefill workers, in bubbles of the steps that follow."""

    enabled: bool = False
    """Let the workers of `weft serve` have the run's own model, with the newest checkpoint's weights, and score
    held-out data with the weights of each checkpoint. `inference.prefill.model` stays empty."""
    documents: Annotated[int, COUNT] = 64
    """Number of held-out documents to score. Each is cut to `data.sequence_length`."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness to score with each checkpoint as well; only those that need log-likelihoods."""
    task_folder: str = ""
    """Folder with YAML files of further tasks of the harness."""
    task_limit: Annotated[int, NATURAL] = 0
    """Number of examples of each task; 0 uses all."""


@dataclass(kw_only=True)
class ScoresConfig:
    """Scores of a frozen model that training needs, computed by prefill workers in bubbles of earlier steps."""

    enabled: bool = False
    """Let the workers of `weft serve` have `distill.teacher`, or `model.path` as the reference of data.kind=preference,
    and score the sequences of coming steps. A step computes in line what has not arrived."""
    steps: Annotated[int, Range(1, 64)] = 4
    """Number of steps whose sequences are scored ahead."""


@dataclass(kw_only=True)
class InferenceConfig:
    """Prefill serving in bubbles."""

    enabled: bool = False
    """Publish each rank's bubbles on a board for co-located prefill workers; off costs the training
    step nothing."""
    boards: str = ""
    """Folder of the boards, private to this user; empty means weft-UID/`train.name` in /dev/shm."""
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    """Prefill workers."""
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    """HTTP service in front of the workers."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """Decode server for whole answers."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation of checkpoints by the workers."""
    scores: ScoresConfig = field(default_factory=ScoresConfig)
    """Scores for training by the workers."""
