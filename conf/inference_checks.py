"""Checks of the settings of prefill workers, their controller and what they evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.conf.hosts import ranks_by_host
from weft.conf.schema import ClusterManager, DataKind, KvConnector, PrefillConfig, Quantization, WeftConfig
from weft.conf.sources import holds_out


def inference_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting of inference that is wrong or in conflict with another."""
    yield from _prefill(config)
    yield from _controller(config)
    yield from _decode(config)
    yield from _evaluate(config)
    yield from _scores(config)


def _prefill(config: WeftConfig) -> Iterator[str]:
    prefill, cluster = config.inference.prefill, config.cluster
    ranks, hosts = prefill.ranks, list[range]()
    if not cluster.hostfile or Path(cluster.hostfile).expanduser().is_file():  # ranks of other hosts need no copy of it
        hosts = ranks_by_host(cluster)
    if len(set(ranks)) < len(ranks) or min(ranks, default=0) < 0:
        yield f"inference.prefill.ranks={ranks}: not a list of distinct ranks; name those of this host"
    elif hosts and max(ranks, default=0) >= (count := hosts[-1].stop):
        yield f"inference.prefill.ranks={ranks}: there are {count} ranks, from 0; correct it, or cluster.ranks"
    elif prefill.model:
        is_one_host = cluster.manager is ClusterManager.local
        if cluster.hostfile and prefill.stages > 1 and hosts:  # stages on other hosts are reached by their names
            is_one_host, hosts = True, [range(hosts[-1].stop)]
        yield from _groups(prefill, hosts, is_one_host=is_one_host)
    if prefill.stages > 1 < prefill.ranks_per_worker:
        yield (
            f"inference.prefill.stages={prefill.stages}: with ranks_per_worker={prefill.ranks_per_worker} the ranks of "
            "a stage would have to begin together; set inference.prefill.ranks_per_worker=1"
        )


def _groups(prefill: PrefillConfig, hosts: Sequence[range], *, is_one_host: bool) -> Iterator[str]:
    """Check that ranks can be divided over workers, each of which runs on one host, or on all that are known."""
    for name in ("ranks_per_worker", "stages"):
        each = getattr(prefill, name)
        for ranks in [prefill.ranks] if prefill.ranks else hosts:
            if len(ranks) % each:
                yield (
                    f"inference.prefill.{name}={each}: {len(ranks)} ranks are not a multiple of it; change it, or name "
                    "the ranks in inference.prefill.ranks"
                )
                break
    each = prefill.ranks_per_worker * prefill.stages
    for first in range(0, 0 if is_one_host else len(prefill.ranks), each):
        group = set(prefill.ranks[first : first + each])
        if hosts and not any(group <= set(host) for host in hosts):
            yield (
                f"inference.prefill.ranks={prefill.ranks}: {sorted(group)} are on several hosts; a worker needs one "
                "(or several stages and cluster.hostfile)"
            )


def _controller(config: WeftConfig) -> Iterator[str]:
    for worker in config.inference.controller.workers:
        yield from _url("inference.controller.workers.url", worker.url, "http://127.0.0.1:8001")
        if worker.decode_url:
            yield from _url("inference.controller.workers.decode_url", worker.decode_url, "http://10.0.0.2:8400")
            if not config.inference.decode.enabled:
                yield (
                    f"inference.controller.workers.decode_url={worker.decode_url}: prompts without a worker have no "
                    "decode server; set inference.decode.enabled=true"
                )
        if worker.cost and not worker.boards:
            yield (
                f"inference.controller.workers.cost={worker.cost}: a worker without boards on this host reports its "
                "costs; leave it out, or give the bubble board of each rank whose device it uses"
            )
        if len(worker.boards) % worker.stages:
            yield (
                f"inference.controller.workers.stages={worker.stages}: {len(worker.boards)} boards are not a multiple "
                "of it; give those of each stage's ranks, stage after stage"
            )

    names = [config.inference.prefill.model]
    for model in config.inference.controller.models:
        yield from _url("inference.controller.models.url", model.url, "http://127.0.0.1:8500")
        if not model.name or model.name in names:
            yield f"inference.controller.models.name={model.name!r}: empty, or another model's; give each its own"
        names.append(model.name)


def _decode(config: WeftConfig) -> Iterator[str]:
    decode = config.inference.decode
    if decode.enabled and config.inference.prefill.connector is KvConnector.none:
        yield "inference.prefill.connector=none: a decode server could not fetch what workers compute; set it to nixl"
    if decode.url:
        yield from _url("inference.decode.url", decode.url, "http://10.0.0.2:8400")


def _url(field: str, url: str, example: str) -> Iterator[str]:
    if not url.startswith(("http://", "https://")):
        yield f"{field}={url!r}: not an HTTP address; give it as in {example}"


def _evaluate(config: WeftConfig) -> Iterator[str]:
    inference, prefill = config.inference, config.inference.prefill
    if not inference.evaluate.enabled:
        return
    wrong = {
        "inference.enabled=false: ranks publish no bubbles; add inference=bubbles": not inference.enabled,
        f"inference.prefill.model={prefill.model}: workers that evaluate have the run's own model; leave it out": (
            bool(prefill.model)
        ),
        f"inference.prefill.stages={prefill.stages}: workers that evaluate have one stage; set it to 1": (
            prefill.stages > 1
        ),
        "inference.decode.enabled=true: the decode server's weights would not follow training; start `weft serve` "
        "without --with-decode": inference.decode.enabled,
        "model.lora.enabled=true: adapters are not merged for workers; set inference.evaluate.enabled=false and "
        "train.eval_every": config.model.lora.enabled,
        "checkpoint.every=0: only the last checkpoint would be evaluated; set it": not config.checkpoint.every,
        "data.eval_fraction=0: nothing is held out; set it (0.02 is common)": not holds_out(config.data),
    }
    yield from (f"inference.evaluate.enabled=true: {problem}" for problem, is_wrong in wrong.items() if is_wrong)


def scored_model(config: WeftConfig) -> str:
    """Return the model whose scores training needs: the teacher, or the reference."""
    return config.distill.teacher if config.distill.enabled else config.model.path


def _scores(config: WeftConfig) -> Iterator[str]:
    inference, model, parallel, distill = config.inference, config.model, config.parallel, config.distill
    if not inference.scores.enabled:
        return
    most = inference.prefill.max_tokens
    wrong = {
        "inference.enabled=false: ranks publish no bubbles; add inference=bubbles": not inference.enabled,
        f"data.kind={config.data.kind.name}: its loss needs no scores; set it to preference, or distill.enabled=true": (
            config.data.kind is not DataKind.preference and not distill.enabled
        ),
        f"inference.prefill.model={inference.prefill.model}: workers have {scored_model(config)}; leave it out": (
            inference.prefill.model not in ("", scored_model(config))
        ),
        "distill.top_k=0: workers send likely tokens, not the whole vocabulary; set it, as to 64": (
            distill.enabled and not distill.top_k
        ),
        "inference.evaluate.enabled=true: workers hold one model; switch one of them off": inference.evaluate.enabled,
        f"inference.prefill.max_tokens={most}: shorter than data.sequence_length={config.data.sequence_length}, and "
        "one more token; raise it": most <= config.data.sequence_length,
        f"model.overrides={model.overrides}: workers load the folder as it is; leave it out": (
            bool(model.overrides) and not distill.enabled
        ),
        f"model.lora.quantize={model.lora.quantize.name}: workers would not have the rounded weights; set it to none": (
            model.lora.quantize is not Quantization.none and not distill.enabled
        ),
        f"parallel.tensor={parallel.tensor} parallel.context={parallel.context}: ranks that share the last stage would "
        "receive different scores; set both to 1": max(parallel.tensor, parallel.context) > 1,
    }
    yield from (f"inference.scores.enabled=true: {problem}" for problem, is_wrong in wrong.items() if is_wrong)
