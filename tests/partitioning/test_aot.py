"""Ahead-of-time compiles: slices by name, what the report counts, and T5-XXL on a v4 chip and a v4-8."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from specjax.drafters.eagle import EagleHead
from specjax.drafters.medusa import MedusaHeads
from specjax.drafters.small_model import SmallModel
from specjax.models import reads
from specjax.models.eagle import Eagle, EagleConfig
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.models.t5 import T5
from specjax.partitioning import aot, chips, flop, topology
from specjax.partitioning import mesh as meshes
from specjax.training.seq2seq import Seq2Seq
from tests import toys
from tests.models import decoders
from tests.partitioning.test_tpu_guard import t5

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu


@pytest.fixture(autouse=True)
def decoding_precision():
    with jax.default_matmul_precision("default"):
        yield


@pytest.mark.parametrize(
    ("name", "count", "extent"),
    [
        ("v4-2", 1, "v4:1x1x1"),
        ("v4-8", 4, "v4:2x2x1"),
        ("v4-512", 256, "v4:4x8x8"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v5e-8", 8, "v5e:2x4"),
        ("v6e-256", 256, "v6e:16x16"),
    ],
)
def test_slices_by_name(name, count, extent):
    """v4 and v5p count cores, v5e and v6e chips; libtpu knows all of them."""
    found = chips.parse(name)
    assert (found.name, found.chips, found.topology) == (name, count, extent)
    assert len(topology.devices(found.topology)) == count


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v4-4", "of v4 there are v4-2, v4-8, v4-16"),
        ("v3-8", "slices are of v4, v5e, v5p, v6e"),
        ("tpu", "e.g. v4-8"),
    ],
)
def test_an_unknown_slice_names_the_known_ones(name, said):
    with pytest.raises(ValueError, match=f"unknown slice '{name}'.*{said}"):
        chips.parse(name)


def test_a_mesh_whose_axes_no_whole_axes_of_the_slice_make():
    """Eight partitions on 4 x 4 x 4 chips."""
    found = meshes.make(8, devices=topology.devices(chips.parse("v4-128").topology))
    assert dict(found.shape) == {"data": 8, "model": 8}
    assert len(set(found.devices.flat)) == 64


HLO = """
%body (p: f32[8]) -> f32[8] {
  %all-reduce.1 = (bf16[1,8,4096]{2,1,0}, f32[4]{0}) all-reduce(%a, %b), replica_groups={}
  %all-gather-start.1 = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%c), dimensions={0}
  %all-gather-done.1 = f32[8,4]{1,0} all-gather-done(%all-gather-start.1)
  %collective-permute-start.1 = (s32[6]{0}, s32[6]{0}, u32[], u32[]) collective-permute-start(%d)
  %fusion.1 = f32[8]{0} fusion(%d), kind=kLoop, calls=%x
}
"""


def test_collectives_are_counted_once_with_their_bytes():
    found = aot.collectives(list(topology.instructions(HLO)), {})
    assert found["all-reduce"] == (1, 8 * 4096 * 2 + 4 * 4)
    assert found["all-gather"] == (1, 8 * 4 * 4)
    assert found["collective-permute"] == (1, 6 * 4)
    assert len(found) == 3


TURNS = """
%one (p: f32[8]) -> f32[8] {
  %all-reduce.1 = f32[8]{0} all-reduce(%p), to_apply=%sum
}

%until (p: f32[8]) -> f32[8] {
  %while.2 = f32[8]{0} while(%p), condition=%below, body=%one, metadata={op_name="x"}
}

%below (p: s32[]) -> pred[] {
  %constant.7 = s32[]{:T(128)} constant(24), metadata={op_name="x"}
  ROOT %lt = pred[]{:T(512)} compare(%p, %constant.7), direction=LT, metadata={op_name="x"}
}

%live (p: s32[]) -> pred[] {
  %constant.8 = s32[]{:T(128)} constant(3)
  ROOT %gt = pred[]{:T(512)} compare(%p, %constant.8), direction=GT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %while.1 = f32[8]{0} while(%p), condition=%live, body=%until
}
"""


def test_what_a_scan_runs_counts_as_often_as_it_turns():
    """24 turns of a scan in one turn of a loop whose turns nobody knows."""
    turns = topology.turns(TURNS)
    assert (turns["main"], turns["until"], turns["one"]) == (1, 1, 24)
    found = aot.collectives(topology.loop_body(TURNS), turns)
    assert found == {"all-reduce": (24, 24 * 32)}


def test_a_report_of_a_tiny_decode(tmp_path):
    """Two groups of two chips: rows and heads split; everything of the report is there."""
    sizes = dict(num_heads=4, emb_dim=64, mlp_dim=128, dtype="bfloat16")
    target, draft = toys.tiny_t5(**sizes, num_decoder_layers=2), toys.tiny_t5(**sizes)
    options = dict(num_partitions=2, batch_size=4, input_length=16, max_decode_len=16)
    drafter = lambda model: SmallModel(model, 3)  # noqa: E731
    found = aot.decode(target, draft, drafter, "v4-8", output_dir=str(tmp_path), **options)
    prefill, run = found.programs
    assert found.fits and found.smallest == "v4-8" and found.mesh == {"data": 2, "model": 2}
    assert run.host_operations == run.cache_copies == 0
    # Megatron's: three a decoder layer and one of the embedding, for the verify block; for the
    # draft twice (its first block and its scan); the rest are scalars of laws over the vocabulary.
    assert run.collectives["all-reduce"][0] >= (3 * 2 + 1) + 2 * (3 + 1)
    assert prefill.collectives["all-reduce"][0] <= 2 * (2 + 1)
    assert [s.name for s in found.steps] == [
        "plain, 1 token", "verify, 4 tokens", "draft, 2 tokens", "draft, 1 token",
    ]  # fmt: skip
    assert found.c > 0 and found.v >= 1
    content = json.loads((tmp_path / "aot.json").read_text())
    assert content["fits"] and content["peak"] == found.peak
    assert "| loop |" in (tmp_path / "aot.md").read_text()


@pytest.mark.parametrize("kind", ["eagle", pytest.param("medusa", marks=pytest.mark.long)])
def test_a_report_of_heads(kind):
    """A round's draft is one program; EAGLE's weights are read once a level, Medusa's once."""
    sizes = dict(num_heads=4, emb_dim=64, mlp_dim=128, dtype="bfloat16")
    target = decoders.tiny_llama(**sizes, num_kv_heads=4, head_dim=16, num_layers=2)
    vocab = target.config.vocab_size
    head = {
        "eagle": Eagle(EagleConfig(vocab_size=vocab, num_kv_heads=4, head_dim=16, **sizes)),
        "medusa": Medusa(MedusaConfig(vocab, 64, heads=3, dtype="bfloat16")),
    }[kind]
    tree = dict(paths=((0,), (1,), (0, 0), (0, 0, 0)))
    made = {"eagle": EagleHead, "medusa": MedusaHeads}[kind]
    found = aot.decode(
        target, head, lambda model: made(model, **tree), "v4-8", num_partitions=2, batch_size=2,
        input_length=16, max_decode_len=16,
    )  # fmt: skip
    run = found.programs[-1]
    assert run.host_operations == run.cache_copies == 0
    assert [s.name for s in found.steps] == ["plain, 1 token", "verify, 5 tokens", "draft, 4 nodes"]
    weights = sum(leaf.size for leaf in reads.whole(head.abstract())) * 2 / 2  # bytes, on two chips
    read = found.steps[-1].bytes
    passes = 3 if kind == "eagle" else 1
    assert passes * weights < read < (passes + 2) * weights  # small arrays are padded
    assert found.c == pytest.approx(found.steps[-1].seconds / 3 / found.steps[0].seconds)


def test_products_are_counted_through_scans_and_branches():
    """Five turns of [2, 3] x [3, 3] and of the dearer branch, [2, 3] x [3, 7]."""
    square, wide = jnp.ones((3, 3)), jnp.ones((3, 7))

    def function(x):
        def body(x, _):
            more = jax.lax.cond(x.sum() > 0, lambda x: (x @ wide).sum(), lambda x: x.sum(), x)
            return jnp.tanh(x @ square), more

        return jax.lax.scan(body, x, None, length=5)

    assert flop.of(function, jnp.ones((2, 3))) == 5 * 2 * (2 * 3 * 3 + 2 * 3 * 7)
    grad = lambda x: jax.grad(lambda x: function(x)[0].sum())(x)  # noqa: E731
    assert flop.of(grad, jnp.ones((2, 3))) >= 5 * 2 * 2 * (2 * 3 * 3)


def test_a_scanned_model_s_report_counts_all_of_its_layers():
    """Operations, all-reduces and bytes are the unrolled model's."""
    sizes = dict(num_heads=4, emb_dim=64, mlp_dim=128, dtype="bfloat16")
    flat = toys.tiny_t5(**sizes, num_decoder_layers=4, num_encoder_layers=4)
    deep = T5(dataclasses.replace(flat.config, scan_layers=True))
    options = dict(topology_name="v4-8", num_partitions=4, input_length=16, max_decode_len=16)
    one, other = (aot.decode(model, **options) for model in (flat, deep))
    # Four layers of six attention projections and three of the feed-forward layer, then the logits.
    products = 2 * (4 * (6 * 64 * 16 + 3 * 64 * 128) + 64 * toys.VOCAB) / 4
    assert products < other.steps[0].flops < 1.1 * products  # and attention's
    assert other.steps[0].bytes == pytest.approx(one.steps[0].bytes, rel=0.1)
    moved = [found.programs[0].collectives["all-reduce"][1] for found in (one, other)]
    assert moved[0] == moved[1]


@pytest.mark.long
def test_a_training_step_is_compiled_scanned_and_rematerialised():
    sizes = dict(num_heads=4, emb_dim=64, mlp_dim=128, dtype="bfloat16")
    flat = toys.tiny_t5(**sizes, num_decoder_layers=4, num_encoder_layers=4)
    deep = T5(dataclasses.replace(flat.config, scan_layers=True))
    lengths = {"inputs": 256, "targets": 256}
    options = dict(lengths=lengths, topology_name="v4-2", batch_size=64)
    plain = aot.train(Seq2Seq(flat, 0.1), **options)
    again = aot.train(Seq2Seq(deep, 0.1, remat_policy="full"), **options)
    assert again.programs[0].temporaries < plain.programs[0].temporaries
    assert again.steps[0].flops == pytest.approx(plain.steps[0].flops, rel=0.3)


def test_rows_that_do_not_divide_are_one_line():
    with pytest.raises(ValueError, match="3 rows do not divide over 4 groups"):
        aot.decode(toys.tiny_t5(), topology_name="v4-8", batch_size=3)
    with pytest.raises(ValueError, match="3 model partitions do not divide the 4 devices"):
        aot.decode(toys.tiny_t5(), topology_name="v4-8", num_partitions=3)


@pytest.mark.long
@pytest.mark.parametrize(("name", "parts"), [("v4-2", 1), ("v4-8", 4)])
def test_xxl_with_small_on_a_chip_and_on_a_v4_8(name, parts):
    """It fits; a Megatron-style split's all-reduces and no more; no cache copied, no host asked."""
    drafter = lambda model: SmallModel(model, 7)  # noqa: E731
    found = aot.decode(t5("xxl", None), t5("small", None), drafter, name, num_partitions=parts)
    prefill, run = found.programs
    assert found.fits
    assert run.host_operations == run.cache_copies == run.scatters == 0
    assert prefill.compile_seconds + run.compile_seconds < 180
    if parts == 1:
        assert run.collectives == {}
    else:
        # Prefill: two a layer and the embedding's; the draft's six heads keep it whole.
        assert prefill.collectives["all-reduce"][0] == 2 * 24 + 1
        plain, verify, *_ = found.steps
        wide = 8 * 4096 * 2  # a verify block of the residual stream
        assert (3 * 24 + 1) * wide <= verify.collective_bytes < (3 * 24 + 2) * wide
        assert plain.collective_bytes * 8 == pytest.approx(verify.collective_bytes, rel=0.1)


def test_what_does_not_fit_says_so_and_what_would():
    """XXL in float32 on one chip: 44 GB of 32."""
    found = aot.Compiled(
        "v4-2", {"data": 1, "model": 1}, {}, [program(40), program(42)], [], 4 * chips.GIB,
        32 * chips.GIB, None, None, None,
    )  # fmt: skip
    assert not found.fits and found.peak == 46 * chips.GIB
    assert aot._smallest(found, chips.parse("v4-2"), 1) == "v4-8"
    (line, *_) = aot.lines(found)
    assert "46.00 of 32.00 GiB" in line and "does not fit; no slice of this chip" in line


def test_what_the_compiler_has_no_room_for_is_one_line():
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
                "temporaries (40.80G) exceeds available HBM (30.75G)."
            )

    said = (
        "does not fit v4-8: temporaries alone need 40.8 of 30.75 GiB.*slice that holds it is v4-16"
    )
    with pytest.raises(ValueError, match=said):
        aot._compile(Lowered(), chips.parse("v4-8"), 4)


def program(gib: int) -> aot.Program:
    return aot.Program("x", 1.0, 0, 0, gib * chips.GIB, {}, 0, 0, 0)
