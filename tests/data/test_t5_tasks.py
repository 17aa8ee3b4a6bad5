"""T5's tasks: text, pieces and metrics, without the data sets themselves."""

import pytest
import seqio
import tensorflow as tf

from specjax import assets
from specjax.data import metrics, t5_tasks

CASES = {
    "wmt_t2t_ende_v003": (
        {"en": "A small house.", "de": "Ein kleines Haus."},
        "translate English to German: A small house.",
        "Ein kleines Haus.",
    ),
    "cnn_dailymail_v002": (
        {"article": "Long text.", "highlights": "Short . text", "id": "7"},
        "summarize: Long text.",
        "Short . text",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_examples_read_as_in_t5(name):
    """What T5's preprocessor makes of a TFDS example, before it is tokenised."""
    example, inputs, targets = CASES[name]
    task = seqio.TaskRegistry.get(name)
    data = tf.data.Dataset.from_tensors(example)
    (row,) = task.preprocessors[0](data).as_numpy_iterator()
    assert row == {"inputs": inputs.encode(), "targets": targets.encode()}


def test_tasks_have_t5s_sources_and_metrics():
    expected = {
        "wmt_t2t_ende_v003": ("wmt_t2t_translate/de-en:1.0.0", metrics.bleu),
        "cnn_dailymail_v002": ("cnn_dailymail:3.1.0", metrics.rouge_of_summaries),
    }
    for name, (source, metric) in expected.items():
        task = seqio.TaskRegistry.get(name)
        assert task.source.tfds_dataset.name == source
        assert task.metric_fns == [metric]
        assert any(isinstance(p, seqio.CacheDatasetPlaceholder) for p in task.preprocessors)


def test_the_vocabulary_has_a_hundred_sentinels_at_its_end(monkeypatch):
    monkeypatch.setenv("SPECJAX_T5_VOCABULARY", str(assets.folder() / "sentencepiece.model"))
    vocabulary = t5_tasks.vocabulary()
    assert vocabulary.vocab_size == 8100
    assert vocabulary.encode("<extra_id_0>") == [8099]
    monkeypatch.delenv("SPECJAX_T5_VOCABULARY")
    assert t5_tasks.vocabulary().sentencepiece_model_file == t5_tasks.DEFAULT_VOCABULARY


def test_rouge_lsum_goes_by_sentences():
    """Two sentences in another order: as lines the longest common subsequence is found in each."""
    target, prediction = "the cat sat . a dog ran .", "a dog ran . the cat sat ."
    found = metrics.rouge_of_summaries([target], [prediction])
    assert found["rougeLsum"] == pytest.approx(100)
    assert metrics.rouge([target], [prediction])["rougeL"] < 60
    assert set(found) == {"rouge1", "rouge2", "rougeLsum"}
