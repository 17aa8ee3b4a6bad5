"""Batches: buckets, padding, and an order that follows from the position alone."""

import numpy as np
import pytest

from specjax.training.batches import Seq2SeqBatches, TokenPairs, load_pairs, save_pairs


def pairs(count: int = 40, seed: int = 0) -> TokenPairs:
    rng = np.random.default_rng(seed)
    make = lambda low, high: np.append(rng.integers(2, 50, rng.integers(low, high)), 1)  # noqa: E731
    return TokenPairs([make(1, 12) for _ in range(count)], [make(1, 6) for _ in range(count)])


@pytest.fixture
def source(tmp_path) -> Seq2SeqBatches:
    save_pairs(str(tmp_path / "a.npz"), pairs())
    return Seq2SeqBatches((str(tmp_path / "a.npz"),), shapes=((8, 8), (16, 8)), tokens=64)


def test_round_trip(tmp_path):
    """What is saved is what is loaded."""
    save_pairs(str(tmp_path / "a.npz"), pairs())
    loaded = load_pairs(str(tmp_path / "a.npz"))
    for name in ("inputs", "targets"):
        for a, b in zip(getattr(loaded, name), getattr(pairs(), name), strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_epoch_reads_every_example_once(source):
    seen = [
        tuple(row[mask])
        for i in range(len(source))
        for row, mask, weight in zip(
            source[i]["inputs"], source[i]["input_mask"], source[i]["weights"], strict=True
        )
        if weight.any()
    ]
    assert sorted(seen) == sorted(tuple(x) for x in pairs().inputs)


def test_the_same_position_gives_the_same_batch(source):
    """Also after other positions were read, and from a new object."""
    first = source[3]
    source[len(source) + 1], source[0]
    again = Seq2SeqBatches(source.files, shapes=source.shapes, tokens=source.tokens)[3]
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])


def test_epochs_differ_in_order(source):
    a = [source[i]["inputs"].tobytes() for i in range(len(source))]
    b = [source[len(source) + i]["inputs"].tobytes() for i in range(len(source))]
    assert a != b


def test_shift_and_weights(source):
    """Decoder inputs are start + targets shifted right; weights cover the target with its EOS."""
    batch = source[0]
    np.testing.assert_array_equal(batch["decoder_inputs"][:, 0], 0)
    np.testing.assert_array_equal(batch["decoder_inputs"][:, 1:], batch["targets"][:, :-1])
    ends = batch["weights"].sum(1).astype(int)
    rows = np.flatnonzero(ends)
    np.testing.assert_array_equal(batch["targets"][rows, ends[rows] - 1], 1)


def test_a_cut_input_keeps_its_eos():
    cut = TokenPairs([np.array([5, 6, 7, 8, 1])], [np.array([1])]).cut(3)
    np.testing.assert_array_equal(cut.inputs[0], [5, 6, 1])


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="2 inputs but 1 targets"):
        TokenPairs([np.array([1]), np.array([1])], [np.array([1])])
    with pytest.raises(ValueError, match="no token arrays at"):
        load_pairs(str(tmp_path / "missing.npz"))
    with pytest.raises(ValueError, match="1 files but 2 weights"):
        Seq2SeqBatches(("a",), weights=(1, 2))
