"""Tasks of lm-evaluation-harness, with likelihoods that prefill workers compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerBase

from weft.conf.schema import EvaluateConfig
from weft.recipes.serving.scoring import Likelihood, Scorer, likelihoods_of


class WorkersModel(TemplateLM):
    """The harness's model whose likelihoods come from prefill workers."""

    def __init__(self, scorers: Sequence[Scorer], tokenizer: PreTrainedTokenizerBase, most_tokens: int) -> None:
        """Use ``scorers``. Longer requests lose their beginning, as in the harness's own models."""
        super().__init__()
        self._scorers, self.tokenizer, self._most_tokens = scorers, tokenizer, most_tokens

    @property
    def eot_token_id(self) -> int:
        """Token that stands for an empty context."""
        return int(self.tokenizer.eos_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenise a text."""
        return list(self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)))

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        prompts = [(context + answer)[-self._most_tokens :] for _, context, answer in requests]
        found = likelihoods_of(self._scorers, prompts)
        return [_of(each[-len(answer) :]) for (_, _, answer), each in zip(requests, found, strict=True)]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of the longest prompt."""
        totals = []
        for request in requests:
            ids = [self.eot_token_id, *self.tok_encode(request.args[0])]
            width = self._most_tokens - 1
            windows = [ids[start : start + width + 1] for start in range(0, len(ids) - 1, width)]
            totals.append(sum(_of(each)[0] for each in likelihoods_of(self._scorers, windows)))
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Refuse, because workers only compute prompts."""
        name = requests[0].task_name if requests else "a task"
        raise ValueError(
            f"inference.evaluate.tasks: {name} generates text, and workers score prompts only; leave it out"
        )


def _of(likelihoods: Sequence[Likelihood]) -> tuple[float, bool]:
    return sum(each.log for each in likelihoods), all(each.is_best for each in likelihoods)


def _manager(evaluate: EvaluateConfig) -> TaskManager:
    """Return the index of tasks: those of the folder, and the harness's thousands only if others are wanted."""
    if evaluate.task_folder:
        own = TaskManager(include_path=evaluate.task_folder, include_defaults=False)
        if set(evaluate.tasks) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=evaluate.task_folder or None)


def check_tasks(evaluate: EvaluateConfig) -> None:
    """Check that the harness has all tasks.

    Raises:
        ValueError: it lacks one. The message has the field, its value and the remedy.
    """
    known = _manager(evaluate).all_tasks
    if unknown := [task for task in evaluate.tasks if task not in known]:
        raise ValueError(
            f"inference.evaluate.tasks: no task {', '.join(unknown)} among the harness's {len(known)}; `lm_eval ls "
            "tasks` lists them, and inference.evaluate.task_folder names a folder with your own"
        )


def score_tasks(
    evaluate: EvaluateConfig, scorers: Sequence[Scorer], tokenizer: PreTrainedTokenizerBase, most_tokens: int
) -> dict[str, float]:
    """Return the harness's metrics as TASK/METRIC.

    Raises:
        ValueError: a task is unknown, or generates text.
        ScoringError: no worker has scored a request.
    """
    found = simple_evaluate(
        model=WorkersModel(scorers, tokenizer, most_tokens),
        tasks=list(evaluate.tasks),
        task_manager=_manager(evaluate),
        limit=evaluate.task_limit or None,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        f"{task}/{name.partition(',')[0]}": float(value)
        for task, metrics in (found or {"results": {}})["results"].items()
        for name, value in metrics.items()
        if isinstance(value, int | float) and "stderr" not in name
    }
