"""A teacher must have the student's tokens, with the same ids."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from weft.conf.schema import DataConfig, DistillConfig, ModelConfig, WeftConfig
from weft.engine.data.teacher_tokens import require_teacher_tokens
from weft.engine.data.tokenizer import train_bpe
from weft.tools.preflight import check_teacher

TEXTS = [f"question {n}: what is {n} and {n}? answer: it is {2 * n}.\n" for n in range(40)]


@pytest.fixture(scope="module")
def student():
    return train_bpe(TEXTS, 300)


@pytest.fixture
def teacher(tmp_path, student):
    """Return a function that writes a teacher and returns the configuration of a run with it."""

    def write(tokenizer=student, rows=400, positions=64):
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, max_position_embeddings=positions, **shape))
        model.save_pretrained(tmp_path / "teacher")
        if tokenizer is not None:
            tokenizer.save_pretrained(tmp_path / "teacher")
        return WeftConfig(
            model=ModelConfig(overrides={"vocab_size": 310}),
            data=DataConfig(sequence_length=32),
            distill=DistillConfig(enabled=True, teacher=str(tmp_path / "teacher")),
        )

    return write


def test_more_tokens_and_more_rows_are_accepted(student, teacher):
    more = train_bpe(TEXTS, 300)
    more.add_tokens(["<|image|>"])
    require_teacher_tokens(student, teacher(more))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokenizer": train_bpe([text.upper() for text in TEXTS], 300)}, "other ones of the teacher.*same tokenizer"),
        ({"tokenizer": None}, "no tokenizer can be loaded.*save the student's tokenizer there"),
        ({"rows": 20}, "20 rows of embeddings, and the student's tokens go up to"),
        ({"positions": 16}, "is made for 16 positions; shorten it$"),
    ],
    ids=["other tokens", "no tokens", "few rows", "few positions"],
)
def test_another_teacher_is_refused_before_ranks_start(student, teacher, tmp_path, given, message):
    config = teacher(**given)
    student.save_pretrained(tmp_path / "student")
    config.model.tokenizer = str(tmp_path / "student")
    with pytest.raises(ValueError, match=message):
        check_teacher(config)


def test_a_missing_folder_is_refused():
    config = WeftConfig(distill=DistillConfig(enabled=True, teacher="./nowhere"))
    with pytest.raises(ValueError, match=r"distill\.teacher=\./nowhere: there is no such folder"):
        check_teacher(config)
