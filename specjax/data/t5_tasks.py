"""T5's own tasks that the papers measure on, under T5's names; importing this imports TensorFlow.

They read TFDS data (``--tfds_data_dir``) or seqio's cached examples; nothing is downloaded until a
task is used. Where the package ``t5`` has registered a name already, its task stays.

References:
  Raffel et al. 2020 (1910.10683), sections 3.1.3 and D: prefixes and metrics.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import seqio
import tensorflow as tf

from specjax.data import metrics

# 32,000 pieces and 100 sentinels, <extra_id_0> the last of them.
DEFAULT_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"


def vocabulary() -> seqio.SentencePieceVocabulary:
    """T5's pieces; the environment variable SPECJAX_T5_VOCABULARY names another copy of the file."""
    path = os.environ.get("SPECJAX_T5_VOCABULARY") or DEFAULT_VOCABULARY
    return seqio.SentencePieceVocabulary(path, extra_ids=100)


def translate(data: tf.data.Dataset, *, source: str, target: str, prefix: str) -> tf.data.Dataset:
    """``{source: text, target: text}`` to a prefixed input and its translation."""

    def pair(example):
        return {"inputs": tf.strings.join([prefix, example[source]]), "targets": example[target]}

    return data.map(pair, num_parallel_calls=tf.data.AUTOTUNE)


def _add(name: str, tfds_name: str, metric_fn: Callable, **fields: str) -> None:
    if name in seqio.TaskRegistry.names():
        return
    feature = functools.partial(seqio.Feature, vocabulary(), add_eos=True)
    seqio.TaskRegistry.add(
        name,
        source=seqio.TfdsDataSource(tfds_name=tfds_name),
        preprocessors=[
            functools.partial(translate, **fields),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature(required=False), "targets": feature()},
        metric_fns=[metric_fn],
    )


_add(
    "wmt_t2t_ende_v003",
    "wmt_t2t_translate/de-en:1.0.0",
    metrics.bleu,
    source="en",
    target="de",
    prefix="translate English to German: ",
)
_add(
    "cnn_dailymail_v002",
    "cnn_dailymail:3.1.0",
    metrics.rouge_of_summaries,
    source="article",
    target="highlights",
    prefix="summarize: ",
)
