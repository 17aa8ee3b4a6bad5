"""The shipped pair: exporting training runs, and loading what was exported."""

import importlib.util
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from specjax import assets
from specjax.checkpoints import int8, native
from specjax.models.t5 import T5, T5Config
from specjax.training import loop
from tests.checkpoints.conftest import MODELS

SCRIPT = assets.folder().parents[2] / "scripts" / "export_pair.py"
TARGET = MODELS["t5x_tiny"]
DRAFT = T5(
    T5Config(
        vocab_size=64, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32,
        num_encoder_layers=1, num_decoder_layers=1, logits_via_embedding=True,
    )
)  # fmt: skip


def gin_text(macro: str, model: T5) -> str:
    config = model.config
    names = ["vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "num_encoder_layers"]
    names += ["num_decoder_layers", "logits_via_embedding"]
    lines = [f"  {name} = {getattr(config, name)}" for name in names]
    scope = macro.lower()
    return "\n".join(
        [
            "from __gin__ import dynamic_registration",
            "from specjax.models import t5",
            f"{macro} = @{scope}/t5.T5()",
            f"{scope}/t5.T5.config = @{scope}/t5.T5Config()",
            f"{scope}/t5.T5Config:",
            *lines,
        ]
    )


def save_run(folder, model, steps) -> None:
    """A training run's checkpoints: parameters grow by 1 each."""
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("float32"), model.abstract())
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        for step in steps:
            shifted = jax.tree.map(lambda x: jnp.asarray(x + step), params)  # noqa: B023
            state = loop.TrainState(shifted, {}, jnp.int32(step), jnp.zeros(2, jnp.uint32))
            loop.save(manager, state)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("export_pair", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_newest_checkpoints_become_a_pair_that_loads(script, tmp_path, monkeypatch, capsys):
    save_run(tmp_path / "t", TARGET, [1, 2])
    save_run(tmp_path / "d", DRAFT, [3])
    for macro, model in (("MODEL", TARGET), ("DRAFT", DRAFT)):
        (tmp_path / f"{macro}.gin").write_text(gin_text(macro, model))
    out = tmp_path / "out"
    arguments = {"target_run": tmp_path / "t", "draft_run": tmp_path / "d", "output_dir": out}
    arguments = [f"--{name}={value}" for name, value in arguments.items()]
    script.main([*arguments, *(f"--gin_file={tmp_path / m}.gin" for m in ("MODEL", "DRAFT"))])
    size = (out / "target.int8.safetensors").stat().st_size
    words = " ".join(capsys.readouterr().out.split())
    assert "target.int8.safetensors: step 2," in words and f"{size:,} bytes" in words
    assert "draft.int8.safetensors: step 3," in words and "max |w - dequantised|" in words

    shutil.copy(assets.folder() / "sentencepiece.model", out)
    monkeypatch.setattr(assets, "folder", lambda: out)
    pair = assets.load_pair()
    assert pair.target == TARGET and pair.draft == DRAFT and pair.vocabulary.size == 8000
    params = native.load_run(str(tmp_path / "t"), TARGET.abstract())
    scale = params["encoder"]["encoder_norm"]["scale"]
    np.testing.assert_array_equal(pair.target_params["encoder"]["encoder_norm"]["scale"], scale)
    embedding = params["token_embedder"]["embedding"]
    np.testing.assert_array_equal(
        pair.target_params["token_embedder"]["embedding"],
        int8.dequantise(*int8.quantise(np.asarray(embedding))),
    )


def test_missing_weights_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "folder", lambda: tmp_path)
    with pytest.raises(ValueError, match="target.int8.safetensors and draft.int8.s") as error:
        assets.load_pair()
    assert "scripts/export_pair.py" in str(error.value) and "\n" not in str(error.value)


def test_export_without_runs_ends_in_one_line(script, tmp_path):
    save_run(tmp_path / "t", TARGET, [1])
    runs = [f"--target_run={tmp_path / 't'}", f"--draft_run={tmp_path / 'none'}"]
    with pytest.raises(SystemExit, match="^export_pair: no checkpoints in .*none") as error:
        script.main([*runs, f"--output_dir={tmp_path / 'out'}"])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists(), "no target without its draft"


def test_export_needs_both_models(script, tmp_path):
    with pytest.raises(SystemExit, match="^export_pair: .*none.gin") as error:
        script.main(["--gin_file=none.gin"])
    assert "\n" not in str(error.value)
    with pytest.raises(SystemExit, match="^export_pair: the gin files do not bind DRAFT"):
        script.main(["--gin_file=configs/models/debian_target.gin"])


def test_sizes_of_the_shipped_pair(script):
    models = script.read_models([f"configs/models/debian_{r}.gin" for r in ("target", "draft")])
    leaves = [jax.tree.leaves(model.abstract()) for model in models.values()]
    target, draft = (sum(x.size for x in shapes) for shapes in leaves)
    assert target > 7 * draft and target + draft < 31 * 2**20, "one byte each, 32 MiB with scales"
    assert models["target"].vocab_size == models["draft"].vocab_size == 8000


def test_export_help(script, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        script.main(["--help"])
    assert "--target_run" in capsys.readouterr().out
