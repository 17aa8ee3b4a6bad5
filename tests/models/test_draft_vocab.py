"""A draft that knows only some of the pieces: what it says, what it learns, and that exactness is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.checkpoints import causal, int8
from specjax.decode.interfaces import Prompt
from specjax.drafters.small_model import SmallModel
from specjax.models import draft_vocab
from specjax.models.llama import Llama, LlamaConfig
from specjax.training.causal_lm import CausalLm

PIECES = 40
KNOWN = draft_vocab.of_ids(np.array([2, 3, 5, 17, 23, 39]), PIECES)


def llama(**changes):
    sizes = dict(vocab_size=PIECES, emb_dim=16, num_layers=2, num_heads=2, num_kv_heads=1)
    sizes |= dict(head_dim=8, mlp_dim=24, tie_embeddings=True, norm_eps=1e-5)
    return Llama(LlamaConfig(**sizes | changes))


def test_ids_go_there_and_back():
    assert KNOWN.ids.tolist() == [2, 3, 5, 17, 23, 39] and len(KNOWN) == 6
    assert KNOWN.own[KNOWN.ids].tolist() == list(range(6))
    assert KNOWN.own[0] == KNOWN.own[38] == 6


def test_logits_stand_at_the_ids_of_the_whole_vocabulary():
    wide = KNOWN.whole(jnp.arange(6.0)[None])
    assert wide.shape == (1, PIECES)
    assert wide[0, KNOWN.ids].tolist() == list(range(6))
    assert np.isneginf(np.delete(np.asarray(wide[0]), KNOWN.ids)).all()


def test_the_most_frequent_pieces_of_files_that_weigh_the_same(tmp_path):
    for name, tokens in (("a", [4] * 9 + [7]), ("b", [7, 8])):
        np.savez(tmp_path / f"{name}.npz", tokens=np.array(tokens, np.uint16))
    files = tuple(str(tmp_path / f"{name}.npz") for name in "ab")
    # Shares: 4 has .9 + 0, 7 has .1 + .5, 8 has 0 + .5.
    assert draft_vocab.most_frequent(files, 2, 10).ids.tolist() == [4, 7]
    assert draft_vocab.most_frequent(files, 2, 10, always=(2,)).ids.tolist() == [2, 4]


@pytest.mark.parametrize("ids", [[], [PIECES], [-1]])
def test_ids_that_are_none_are_refused(ids):
    with pytest.raises(ValueError, match="draft vocabulary takes ids below 40"):
        draft_vocab.of_ids(np.array(ids, np.int64), PIECES)


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(ValueError, match="not one of 80 bits"):
        draft_vocab.DraftVocab(KNOWN.mask, 80)
    with pytest.raises(ValueError, match="draft vocabulary of 40 pieces, the model has 41"):
        llama(vocab_size=41, draft_vocab=KNOWN)


@pytest.mark.usefixtures("long_vectors")
@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_says_known_pieces_only_and_tiles_to_the_same_logits(tied):
    model = llama(draft_vocab=KNOWN, tie_embeddings=tied)
    params = model.init(jax.random.key(0))
    rows = {
        name: params[name]["weight"].shape[0]
        for name in ("embed_tokens", "lm_head")
        if name in params
    }
    assert rows == {"embed_tokens": 7} | ({} if tied else {"lm_head": 6})
    x = jax.random.normal(jax.random.key(1), (2, 1, 16))
    logits = model.logits(params, x)
    assert logits.shape == (2, 1, PIECES)
    assert np.isfinite(logits[..., KNOWN.ids]).all() and np.isneginf(logits).sum() == 2 * 34
    np.testing.assert_allclose(model.logits(model.tile(params), x), logits, atol=1e-6)


def test_pieces_it_does_not_know_are_read_alike_and_not_learnt():
    model = llama(draft_vocab=KNOWN)
    params, recipe = model.init(jax.random.key(0)), CausalLm(model)
    rows = jnp.array([[2, 3, 0, 5], [2, 3, 38, 5]], jnp.int32)
    logits = model.forward(params, rows)
    np.testing.assert_array_equal(logits[0], logits[1])
    sums = recipe.evaluate(params, {"tokens": rows, "weights": jnp.ones((2, 3))})
    assert sums["tokens"] == 4  # of three targets a row the second is not known
    of = {"tokens": rows[:, :2], "weights": jnp.ones((2, 1))}
    first = recipe.evaluate(params, of)["loss"]
    law = jax.nn.log_softmax(model.forward(params, rows[:, :1])[:, 0])
    np.testing.assert_allclose(first, -law[:, KNOWN.own[3]].sum(), rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_with_it_is_exact_and_accepts(temperature):
    """The target knows everything; a draft that is the target but for what it cannot say."""
    target = llama(tie_embeddings=False)
    draft = llama(tie_embeddings=False, draft_vocab=KNOWN)
    params = target.init(jax.random.key(0))
    params["lm_head"]["weight"] *= 40.0
    # It likes half of what it says to be known.
    params["lm_head"]["weight"] = params["lm_head"]["weight"].at[KNOWN.ids].multiply(2.0)
    drafts = params | {
        "embed_tokens": {"weight": params["embed_tokens"]["weight"][jnp.asarray([*KNOWN.ids, 0])]},
        "lm_head": {"weight": params["lm_head"]["weight"][KNOWN.ids]},
    }
    prompt = Prompt(jnp.array([[2, 5, 3], [17, 23, 0]], jnp.int32), jnp.array([3, 2], jnp.int32))
    options = dict(
        sampling=specjax.Sampling(temperature=temperature), max_decode_len=24, eos_id=-1,
        key=jax.random.key(3),
    )  # fmt: skip
    out = specjax.generate(
        target, params, prompt, drafter=SmallModel(draft, 3), draft_params=drafts, **options
    )
    assert (out.stats.accepted > 0).all() and (out.stats.accepted < out.stats.drafted).all()
    if temperature == 0:
        plain = specjax.generate(target, params, prompt, **options)
        np.testing.assert_array_equal(out.tokens, plain.tokens)


def test_it_goes_into_a_file_and_back_but_not_to_hugging_face(tmp_path):
    model = llama(draft_vocab=KNOWN)
    int8.save(tmp_path / "draft.safetensors", model, model.init(jax.random.key(0)))
    assert int8.load_model(tmp_path / "draft.safetensors")[0] == model
    with pytest.raises(ValueError, match="no Llama that knows only some of the pieces"):
        causal.save(model.init(jax.random.key(0)), model, tmp_path / "hf")
