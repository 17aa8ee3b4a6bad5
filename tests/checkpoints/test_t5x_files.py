"""Where T5X checkpoints lie, older layouts, and what is said when something is wrong."""

import dataclasses
import pathlib
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization

from specjax.checkpoints import t5x
from specjax.models.t5 import T5
from tests.checkpoints.conftest import MODELS, T5X, error_of

TINY = MODELS["t5x_tiny"]


def edit(folder: pathlib.Path, change) -> None:
    """Rewrites the file ``checkpoint`` after ``change(contents)``."""
    file = folder / "checkpoint_0" / "checkpoint"
    contents = serialization.msgpack_restore(file.read_bytes())
    change(contents)
    file.write_bytes(serialization.msgpack_serialize(contents))


def store(folder: pathlib.Path, name: str, x: np.ndarray, dtype: str) -> None:
    """Writes an array over a tensor's data, as T5X does."""
    place = folder / "checkpoint_0" / f"target.{name}"
    shutil.rmtree(place, ignore_errors=True)
    metadata = {"shape": x.shape, "chunks": x.shape, "dtype": dtype, "fill_value": None}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{place}/"}}
    ts.open({**spec, "metadata": metadata}, create=True).result().write(x).result()


def test_newest_finished_checkpoint_is_taken(tiny):
    for name in ("checkpoint_9", "checkpoint_10", "checkpoint_11.tmp-1700000000"):
        shutil.copytree(tiny / "checkpoint_0", tiny / name)
    (tiny / "checkpoint_12").mkdir()
    assert t5x.find(tiny).name == "checkpoint_10"
    assert t5x.find(str(tiny / "checkpoint_9")).name == "checkpoint_9"
    assert t5x.find(tiny / "checkpoint_9" / "checkpoint").name == "checkpoint_9"


@pytest.mark.parametrize("function", [t5x.read, t5x.infer_config, lambda p: t5x.load(p, TINY)])
def test_no_checkpoint_is_one_line(function, tmp_path):
    assert "no T5X checkpoint" in error_of(function, tmp_path)
    assert str(tmp_path / "none") in error_of(function, tmp_path / "none")
    assert "only local folders and gs://" in error_of(function, "s3://bucket/checkpoint_1")


@pytest.mark.parametrize("content", [b"", b'model_checkpoint_path: "x"', b"\x81\xa1a\x01", b"\xc1"])
def test_other_files_are_refused(tiny, content):
    (tiny / "checkpoint_0" / "checkpoint").write_bytes(content)
    assert "checkpoint is not T5X's" in error_of(t5x.read, tiny)


def test_unknown_version_is_refused(tiny):
    edit(tiny, lambda contents: contents.update(version=1))
    assert "version 1" in error_of(t5x.read, tiny)


def test_everything_wrong_is_named_at_once(tiny):
    def change(contents):
        target = contents["optimizer"]["target"]
        target["decoder"]["extra"] = {"kernel": target["decoder"]["logits_dense"]["kernel"]}
        del target["decoder"]["decoder_norm"], target["encoder"]["encoder_norm"]

    edit(tiny, change)
    store(tiny, "encoder.layers_0.mlp.wo.kernel", np.zeros((63, 32), np.float32), "<f4")
    store(tiny, "token_embedder.embedding", np.zeros((32, 64), np.float32), "<f4")
    shutil.rmtree(tiny / "checkpoint_0" / "target.decoder.layers_1.mlp.wi_0.kernel")
    said = error_of(t5x.load, tiny, TINY)
    for part in (
        "missing: decoder.decoder_norm.scale, encoder.encoder_norm.scale;",
        "unexpected: decoder.extra.kernel;",
        "encoder.layers_0.mlp.wo.kernel is (63, 32), not (64, 32)",
        "token_embedder.embedding is (32, 64), not (64, 32)",
        "no readable data: decoder.layers_1.mlp.wi_0.kernel",
    ):
        assert part in said
    assert said.count("decoder.layers_1.mlp.wi_0.kernel") == 1


def test_another_model_does_not_fit():
    scanned = MODELS["t5x_scanned"].config
    shared = T5(dataclasses.replace(scanned, shared_relative_bias=True))
    said = error_of(t5x.load, T5X / "t5x_scanned", shared)
    assert "missing: decoder.relpos_bias.rel_embedding, encoder.relpos_bias.rel_embedding" in said
    assert len(re.findall(r"layers_\d\.relpos_bias", said)) == 6
    heads = T5(dataclasses.replace(TINY.config, num_heads=8, head_dim=4))  # the same product
    assert error_of(t5x.load, T5X / "t5x_tiny", heads).count("rel_embedding is (4, 32)") == 2


def test_lost_and_damaged_chunks_are_named(tiny):
    """A chunk that is not there must not be read as zeros."""
    lost = tiny / "checkpoint_0" / "target.decoder.layers_0.mlp.wo.kernel" / "0.0"
    damaged = tiny / "checkpoint_0" / "target.encoder.layers_1.mlp.wo.kernel" / "0.0"
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:100])
    for function in (t5x.read, lambda path: t5x.load(path, TINY)):
        said = error_of(function, tiny)
        assert "decoder.layers_0.mlp.wo.kernel, encoder.layers_1.mlp.wo.kernel" in said


def test_version_2_holds_bfloat16_as_uint16(tiny):
    name = "decoder.logits_dense.kernel"
    x = t5x.read(tiny)[name].astype(ml_dtypes.bfloat16)
    store(tiny, name, x.view(np.uint16), "<u2")
    edit(tiny, lambda contents: contents.update(version=2))
    weight = t5x.load(tiny, TINY)["decoder"]["logits_dense"]["weight"]
    np.testing.assert_array_equal(weight, x.T.astype(np.float32))


def test_native_bfloat16(tiny):
    name = "decoder.logits_dense.kernel"
    x = t5x.read(tiny)[name].astype(ml_dtypes.bfloat16)
    store(tiny, name, x, "bfloat16")
    weight = t5x.load(tiny, TINY)["decoder"]["logits_dense"]["weight"]
    np.testing.assert_array_equal(weight, x.T.astype(np.float32))


def test_arrays_inside_the_msgpack_file(tiny):
    x = np.arange(32, dtype=np.float32)

    def change(contents):
        contents["optimizer"]["target"]["encoder"]["encoder_norm"]["scale"] = x

    edit(tiny, change)
    shutil.rmtree(tiny / "checkpoint_0" / "target.encoder.encoder_norm.scale")
    np.testing.assert_array_equal(t5x.load(tiny, TINY)["encoder"]["encoder_norm"]["scale"], x)


@pytest.mark.parametrize(
    "spec",
    [
        {"kvstore": {"driver": "file", "path": "target.x/"}},
        {"kvstore": {"driver": "gfile", "path": "target.x/"}},
        {"kvstore": {"driver": "gcs", "bucket": "dummy", "path": "target.x/"}},
        {"kvstore": {"driver": "gfile"}, "path": "target.x/"},
    ],
)
def test_tensors_lie_beside_the_checkpoint_wherever_it_was_written(spec):
    assert t5x.kvstore("/m/checkpoint_1", spec) == {
        "driver": "file",
        "path": "/m/checkpoint_1/target.x/",
    }


def test_configuration_of_a_v1_0_checkpoint(tiny):
    def change(contents):
        target = contents["optimizer"]["target"]
        del target["decoder"]["logits_dense"]
        for stack in (target["encoder"], target["decoder"]):
            for i in range(2):
                mlp = stack[f"layers_{i}"]["mlp"]
                mlp["wi"] = mlp.pop("wi_0")
                del mlp["wi_1"]

    edit(tiny, change)
    config = t5x.infer_config(tiny)
    assert config.mlp_activations == ("relu",) and config.logits_via_embedding
    t5x.load(tiny, T5(config))


def test_a_decoder_only_checkpoint_has_no_configuration(tiny):
    edit(tiny, lambda contents: contents["optimizer"]["target"].pop("encoder"))
    said = error_of(t5x.infer_config, tiny)
    assert "no T5 encoder-decoder" in said and "encoder.layers_0.attention.query.kernel" in said
