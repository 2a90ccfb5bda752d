"""Check that a teacher has the student's tokens."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from weft.conf.schema import WeftConfig
from weft.engine.data.tokenizer import load_tokenizer
from weft.engine.stages.teacher import load_teacher_config


def require_teacher_tokens(tokenizer: PreTrainedTokenizerBase, config: WeftConfig) -> None:
    """Check that the teacher can be read, and knows every token of the student by the same id. It may have more.

    Raises:
        ValueError: it cannot be read, or has other tokens.
    """
    rows = load_teacher_config(config, config.data.sequence_length).get_text_config().vocab_size
    name = f"distill.teacher={config.distill.teacher}"
    try:
        teacher = load_tokenizer(replace(config.model, tokenizer=config.distill.teacher), config.data).get_vocab()
    except ValueError as error:
        reason = str(error).partition(": ")[2].partition("; set ")[0]
        raise ValueError(f"{name}: {reason}; save the student's tokenizer there if the tokens are the same") from error
    own = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    other = [(number, token) for number, token in own if teacher.get(token) != number]
    if other:
        number, token = other[0]
        theirs = teacher.get(token, "no token")
        raise ValueError(
            f"{name}: {len(other)} of the student's {len(own)} tokens are other ones of the teacher, such as "
            f"{token!r}, which is {number} of the student and {theirs} of the teacher; choose a teacher "
            f"with the same tokenizer, or set model.tokenizer={config.distill.teacher} for a new student"
        )
    if own[-1][0] >= rows:
        raise ValueError(
            f"{name}: it has {rows} rows of embeddings, and the student's tokens go up to {own[-1][0]}; choose a "
            "teacher that has all of them"
        )
