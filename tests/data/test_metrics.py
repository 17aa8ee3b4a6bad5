"""BLEU and ROUGE against values worked out by hand."""

import math

import pytest

from specjax.data import metrics

SENTENCES = ["the cat sat on the mat today", "a library for reading and writing files"]


def test_perfect_predictions_score_100():
    assert metrics.bleu(SENTENCES, SENTENCES)["bleu"] == pytest.approx(100)
    assert metrics.rouge(SENTENCES, SENTENCES) == pytest.approx(
        {"rouge1": 100, "rouge2": 100, "rougeL": 100}
    )


def test_bleu_of_a_shortened_prediction():
    # All n-grams of the first 6 of 8 words match, so only the brevity penalty exp(1 - 8/6) is left.
    target = "one two three four five six seven eight"
    score = metrics.bleu([target], ["one two three four five six"])["bleu"]
    assert score == pytest.approx(100 * math.exp(1 - 8 / 6))


def test_bleu_tokenizes_like_t5():
    # The international tokenizer parts the symbol from its words (7 tokens), sacrebleu's default
    # does not (5 tokens, every 4-gram of which contains the differing word).
    target, prediction = "w x y z a»b", "w x y z a»c"
    assert metrics.bleu([target], [prediction])["bleu"] == pytest.approx(
        100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** (1 / 4)
    )


def test_rouge_by_hand():
    # Prediction "a c b" against "a b c d": unigrams P 3/3, R 3/4; no common bigram; LCS 2.
    scores = metrics.rouge(["a b c d"], ["a c b"])
    assert scores == pytest.approx({"rouge1": 600 / 7, "rouge2": 0, "rougeL": 400 / 7})


def test_rouge_is_the_mean_over_examples():
    assert metrics.rouge(["a b", "c d"], ["a b", "x y"])["rouge1"] == pytest.approx(50)


@pytest.mark.parametrize("metric", [metrics.bleu, metrics.rouge])
@pytest.mark.parametrize("sides", [([], []), (["a"], ["a", "b"])])
def test_bad_numbers_of_examples_raise(metric, sides):
    with pytest.raises(ValueError, match="targets and"):
        metric(*sides)
