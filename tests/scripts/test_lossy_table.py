"""scripts/lossy_table.py on a few sentences, with heads of random weights for the shipped target."""

import pathlib
import runpy
import sys

import jax
import pytest

from specjax import assets
from specjax.checkpoints import native
from specjax.models.medusa import Medusa, MedusaConfig

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "lossy_table.py"


@pytest.mark.long
def test_every_rule_has_its_row(tmp_path, monkeypatch, capsys):
    target = assets.load_pair().target
    heads = Medusa(MedusaConfig(target.vocab_size, target.config.emb_dim, heads=3))
    native.save(tmp_path / "heads", heads, heads.init(jax.random.key(0)))
    said = (
        f"{SCRIPT} --heads {tmp_path / 'heads'} --sentences 2 --batch 2 --repeats 2 --temperatures 1 "
        "--max_decode_len 8"
    )
    monkeypatch.setattr(sys, "argv", said.split())
    runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capsys.readouterr().out
    for rule in ("speculative sampling", "typical, ε .09", "typical, ε .3", "top-k, k 2"):
        assert out.count(rule) == 2  # tasks
