"""Text metrics of the tasks, as T5 computes them; no seqio, no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import sacrebleu
from rouge_score import rouge_scorer

_ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU by sacrebleu, with the international tokenizer that T5 reports.

    Args:
      targets: One reference each.
      predictions: As many outputs.

    Returns:
      `bleu`, in percent.

    Raises:
      ValueError: The numbers differ, or there are none.
    """
    _check(targets, predictions)
    score = sacrebleu.corpus_bleu(
        list(predictions), [list(targets)], smooth_method="exp", tokenize="intl"
    )
    return {"bleu": score.score}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L.

    T5 reports the middle of a bootstrap, which is random; the mean that it estimates is not.

    Args:
      targets: One reference each.
      predictions: As many outputs.

    Returns:
      `rouge1`, `rouge2`, `rougeL`, in percent.

    Raises:
      ValueError: The numbers differ, or there are none.
    """
    return _rouge(targets, predictions, _ROUGE_TYPES)


def rouge_of_summaries(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum, as T5 scores CNN/Daily Mail.

    ROUGE-Lsum takes lines for sentences; T5 begins a line after every `` . ``.

    Args:
      targets: One reference each.
      predictions: As many outputs.

    Returns:
      `rouge1`, `rouge2`, `rougeLsum`, in percent.

    Raises:
      ValueError: The numbers differ, or there are none.
    """
    lines = lambda texts: [text.replace(" . ", " .\n") for text in texts]  # noqa: E731
    return _rouge(lines(targets), lines(predictions), ("rouge1", "rouge2", "rougeLsum"))


def _rouge(
    targets: Sequence[str], predictions: Sequence[str], types: tuple[str, ...]
) -> dict[str, float]:
    _check(targets, predictions)
    scorer = rouge_scorer.RougeScorer(types)
    scores = [scorer.score(t, p) for t, p in zip(targets, predictions, strict=True)]
    return {name: 100 * float(np.mean([s[name].fmeasure for s in scores])) for name in types}


def _check(targets: Sequence[str], predictions: Sequence[str]) -> None:
    if not targets or len(targets) != len(predictions):
        raise ValueError(f"{len(targets)} targets and {len(predictions)} predictions")
