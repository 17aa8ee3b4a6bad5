"""scripts/export_heads.py: a run's heads as files, and the target of Medusa-2 beside them."""

import pathlib
import runpy
import sys

import jax
import numpy as np
import pytest

from specjax import checkpoints
from specjax.models import draft_vocab
from specjax.models.eagle import Eagle, EagleConfig
from specjax.models.joint import Joint
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.training import loop
from specjax.training.heads import Eagle1
from specjax.training.medusa2 import Medusa2
from tests import toys
from tests.models import decoders

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "export_heads.py"
TARGET = decoders.tiny_llama()
WIDTH = TARGET.config.emb_dim


def export(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


class Texts:
    """One random text with states, the same at every position."""

    def __len__(self):
        return 1

    def __getitem__(self, position):
        rng = np.random.default_rng(0)
        tokens = rng.integers(2, toys.VOCAB, (1, 8)).astype(np.int32)
        states = rng.normal(size=(1, 8, WIDTH)).astype(np.float32)
        return {"tokens": tokens, "weights": np.ones((1, 8), np.float32), "states": states}


def train(recipe, folder):
    return loop.train(
        recipe, Texts(), str(folder), loop.Schedule(1e-3, 1, 2, 1), optimizer="adamw",
        initial_params=jax.device_get(recipe.init(jax.random.key(0))),
    ).params  # fmt: skip


def test_eagle_as_its_authors_write_it_and_in_int8(tmp_path, monkeypatch):
    sizes = dict(
        vocab_size=toys.VOCAB, emb_dim=WIDTH, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
    )
    params = train(Eagle1(Eagle(EagleConfig(**sizes))), tmp_path / "run")
    export(monkeypatch, f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'out'}")
    _, found = checkpoints.load_any(tmp_path / "out")
    own = {n: x for n, x in params.items() if n not in ("embed_tokens", "lm_head")}
    jax.tree.map(np.testing.assert_array_equal, found, own)
    export(monkeypatch, f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'small'}", "--int8")
    model, found = checkpoints.load_any(tmp_path / "small" / "heads.int8.safetensors")
    assert model.config.alone
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), found, own)


def test_medusa_2_is_its_heads_and_its_target(tmp_path, monkeypatch):
    vocab = draft_vocab.of_ids(np.arange(2, 12), toys.VOCAB)
    recipe = Medusa2(Joint(TARGET, Medusa(MedusaConfig(toys.VOCAB, WIDTH, 2, draft_vocab=vocab))))
    params = train(recipe, tmp_path / "run")
    where = [f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(SystemExit, match="vLLM's do"):
        export(monkeypatch, *where)
    assert not (tmp_path / "out").exists()
    export(monkeypatch, *where, "--style=vllm")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    model, found = checkpoints.load_any(tmp_path / "out" / "target")
    assert model == TARGET
    jax.tree.map(np.testing.assert_array_equal, found, params["target"])


def test_a_run_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="export_heads: "):
        export(monkeypatch, f"--run={tmp_path / 'none'}", f"--out={tmp_path / 'out'}")
