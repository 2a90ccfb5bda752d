import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from weft.conf.schema import DataConfig, ModelConfig
from weft.engine.data import build_loader, load_tokenizer, vocabulary_for
from weft.engine.data import tokenizer as module
from weft.engine.data.corpus import Corpus, load_corpus
from weft.engine.data.tokenizer import BOS, EOS, PAD, corpus_tokenizer, padding_id, tokenizer_sha256, train_bpe

SMALL = Corpus(tuple(f"def double_{n}(x):\n    return {n} * x\n" * 30 for n in range(12)))


@pytest.fixture
def small_corpus(monkeypatch):
    from weft.engine.data import open as opening

    for place in (module, opening):
        monkeypatch.setattr(place, "load_corpus", lambda: SMALL)


def test_the_corpus_is_the_standard_library():
    corpus = load_corpus()
    assert len(corpus.texts) > 400 and corpus.num_bytes > 5_000_000
    assert any("class OrderedDict" in text for text in corpus.texts)
    assert any('The "with" statement' in text for text in corpus.texts)
    assert all(text.strip() for text in corpus.texts)
    assert corpus.sha256 == load_corpus().sha256
    assert corpus.sha256[:8] in corpus.description


def test_the_hash_knows_where_documents_end():
    assert Corpus(("ab", "c")).sha256 != Corpus(("a", "bc")).sha256


def test_a_python_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.kind=corpus: .* no Python sources"):
        load_corpus(tmp_path)


def test_training_a_tokenizer_is_reproducible():
    one, other = train_bpe(SMALL.texts, 400), train_bpe(SMALL.texts, 400)
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert tokenizer_sha256(one) == tokenizer_sha256(other) != tokenizer_sha256(train_bpe(SMALL.texts, 280))


def test_its_texts_come_back(tokenizer):
    for text in ("plain", "  indented\n\n\tünïcödé 漢字 🙂", ""):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (PAD, BOS, EOS)
    assert padding_id(tokenizer) == tokenizer.pad_token_id


def test_its_hash_ignores_how_it_was_last_called(tokenizer):
    before = tokenizer_sha256(tokenizer)
    tokenizer(["a", "b c d"], truncation=True, max_length=2, padding=True)
    assert tokenizer_sha256(tokenizer) == before


def test_it_is_trained_once_and_then_read(tmp_path, small_corpus, monkeypatch):
    first = corpus_tokenizer(tmp_path)
    monkeypatch.setattr(module, "train_bpe", None)
    second = load_tokenizer(ModelConfig(), DataConfig(cache_dir=str(tmp_path)))
    assert tokenizer_sha256(first) == tokenizer_sha256(second)
    assert second.chat_template == first.chat_template
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [
        f"tokenizer-{SMALL.sha256[:12]}-{module.VOCABULARY}"
    ]


def test_one_that_others_could_have_changed_is_trained_anew(tmp_path, small_corpus):
    first = corpus_tokenizer(tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "tokenizer.json").write_text("{}")
    folder.chmod(0o777)
    assert tokenizer_sha256(corpus_tokenizer(tmp_path)) == tokenizer_sha256(first)
    assert not folder.stat().st_mode & 0o077


def test_a_draft_that_failed_leaves_nothing_behind(tmp_path, small_corpus, monkeypatch):
    def broken(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(module.PreTrainedTokenizerFast, "save_pretrained", broken)
        with pytest.raises(OSError, match="disk full"):
            corpus_tokenizer(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(corpus_tokenizer(tmp_path)) > 256


def test_the_models_own_tokenizer_comes_first(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "a")
    model = ModelConfig(path=str(tmp_path / "a"))
    assert tokenizer_sha256(load_tokenizer(model, DataConfig())) == tokenizer_sha256(
        AutoTokenizer.from_pretrained(tmp_path / "a")
    )
    model = ModelConfig(path="/nowhere", tokenizer=str(tmp_path / "a"))
    assert len(load_tokenizer(model, DataConfig())) == len(tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model\.path=.*empty: no tokenizer can be loaded .*set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "empty")), DataConfig())


def test_corpus_batches(tmp_path, small_corpus):
    config = DataConfig(sequence_length=32, eval_fraction=0.2, cache_dir=str(tmp_path))
    tokenizer = load_tokenizer(ModelConfig(), config)
    options = {"microbatch_size": 2, "replica": 0, "num_replicas": 1, "seed": 0}
    training = build_loader(config, tokenizer, **options)
    held = build_loader(config, tokenizer, evaluation=True, **options)
    assert f"sha256 {SMALL.sha256[:8]}): 10 documents" in training.description
    assert "2 documents" in held.description
    assert next(training)["input_ids"].shape == (2, 32)
    assert len(list(held)) == len(list(held)) > 0
    training.close()


@given(words=st.integers(1, 300_000), members=st.integers(1, 64))
def test_a_new_models_vocabulary_can_be_divided(words, members):
    size = vocabulary_for(words, members)
    assert size % members == 0
    assert words <= size < words + members
