"""The decode loop as a TPU program, compiled without a TPU: no CPU-only design may creep in."""

import dataclasses
import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from specjax import config
from specjax.decode import loop
from specjax.decode.interfaces import Params, Prompt
from specjax.decode.sampling import Sampling
from specjax.drafters.small_model import SmallModel
from specjax.models import layers
from specjax.models.t5 import T5
from specjax.partitioning import aot, topology

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu

GAMMA, INPUT_LENGTH, MAX_DECODE_LEN = 5, 128, 128
# (target, draft, decoder layers kept): layers are alike, so two of each show what a loop is made of.
FAST, WHOLE = ("base", "small", 2), ("xxl", "small", None)
each_pair = pytest.mark.parametrize("pair", [FAST, WHOLE], ids=lambda pair: "-".join(pair[:2]))
# XXL as a whole is compiled in test_aot.py; here it is lowered.
fast_pair = pytest.mark.parametrize("pair", [FAST], ids=lambda pair: "-".join(pair[:2]))


@pytest.fixture(autouse=True)
def decoding_precision():
    """Decoding's own precision; the other tests ask for the highest, for CPUs."""
    with jax.default_matmul_precision("default"):
        yield


def t5(name: str, depth: int | None) -> T5:
    """The model of a gin file in bfloat16, cut to some layers if asked."""
    config.parse([f"configs/models/t5_1_1_{name}.gin"], ["DTYPE = 'bfloat16'"])
    model = config.macro("MODEL")
    if depth is None:
        return model
    kept = dict(num_encoder_layers=depth, num_decoder_layers=depth)
    return T5(dataclasses.replace(model.config, **kept))


@functools.cache
def arguments(pair: tuple) -> tuple:
    """Decoder and abstract arguments of `loop.jit_run` for one row."""
    target, draft = t5(pair[0], pair[2]), t5(pair[1], pair[2])
    decoder = loop.Decoder(target, MAX_DECODE_LEN, SmallModel(draft, GAMMA))
    params = Params(target.abstract(jnp.bfloat16), draft.abstract(jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((1, INPUT_LENGTH), jnp.int32)
    prompt = Prompt(tokens, jax.ShapeDtypeStruct((1,), jnp.int32))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(functools.partial(loop.start, decoder), params, prompt, keys)
    return decoder, params, state, Sampling(jax.ShapeDtypeStruct((1,), jnp.float32))


@functools.cache
def lowered(pair: tuple) -> jax.stages.Lowered:
    return topology.lower_for(loop.jit_run, topology.chip(), *arguments(pair))


@functools.cache
def compiled(pair: tuple) -> jax.stages.Compiled:
    return lowered(pair).compile()


def cache_shapes(pair: tuple) -> set[tuple[int, ...]]:
    """Shapes of all keys and values: both models', the cross-attention's too."""
    state = arguments(pair)[2]
    held = (state.cache, state.drafter.cache)
    leaves = jax.tree.leaves([(cache.kv, cache.cross) for cache in held])
    return {leaf.shape for leaf in leaves}


def num_bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def products(stablehlo: str) -> Counter:
    """How often an array is the second factor of a `dot_general`, by its sizes."""
    factors = re.findall(r"stablehlo\.dot_general .* : \(.*, tensor<([0-9x]+)x\w+>\) ->", stablehlo)
    return Counter(tuple(int(n) for n in sizes.split("x")) for sizes in factors)


def products_needed(model: T5, params) -> Counter:
    """Products of one decoder step; cross-attention's keys and values are the prompt's."""
    needed = Counter()
    for path, leaf in jax.tree.leaves_with_path(params["decoder"]):
        names = [key.key for key in path]
        projected = "encoder_decoder_attention" in names and names[-2] in ("key", "value")
        if names[-1] == "weight" and not projected:
            needed[leaf.shape] += 1
    return needed


def summed_products(stablehlo: str) -> set[tuple[int, ...]]:
    """Leading sizes ``[N, K]`` of all sums: a weight's, where a product is multiplied and summed."""
    summed = re.findall(
        r"stablehlo\.reduce\(.*stablehlo\.add.* : \(tensor<([0-9x]+)x\w+>,", stablehlo
    )
    return {tuple(int(n) for n in sizes.split("x")[:2]) for sizes in summed}


def scattered(stablehlo: str) -> set[tuple[int, ...]]:
    """Sizes of all arrays that something is scattered into."""
    into = re.findall(r'"stablehlo\.scatter".*?\}\) : \(tensor<([0-9x]+)x\w+>,', stablehlo, re.S)
    return {tuple(int(n) for n in sizes.split("x")) for sizes in into}


@each_pair
def test_every_weight_product_is_a_dot(pair):
    decoder, params, *_ = arguments(pair)
    text = lowered(pair).as_text()
    # The target verifies once; the draft reads the first block, then each draft in a scan.
    needed = products_needed(decoder.model, params.target)
    for _ in range(2):
        needed += products_needed(decoder.drafter.model, params.draft)
    found = products(text)
    assert {shape: found[shape] for shape in needed} == dict(needed)
    assert not summed_products(text) & set(needed)


@fast_pair
def test_loop_fits_in_memory(pair):
    _, params, *_ = arguments(pair)
    # The encoders are no arguments of the loop, and lie in memory none the less.
    encoders = num_bytes([params.target["encoder"], params.draft["encoder"]])
    assert topology.memory_bytes(compiled(pair)) + encoders < topology.V4_HBM_BYTES


@fast_pair
def test_state_is_updated_where_it_lies(pair):
    size = compiled(pair).memory_analysis()
    assert size.output_size_in_bytes - size.alias_size_in_bytes < 2**16


@fast_pair
def test_loop_never_asks_the_host(pair):
    assert aot.HOST.findall(compiled(pair).as_text()) == []


@fast_pair
def test_loop_copies_no_cache(pair):
    for shape in cache_shapes(pair):
        assert topology.copies(compiled(pair).as_text(), shape) == []
    assert not scattered(lowered(pair).as_text()) & cache_shapes(pair)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("tiled", [False, True], ids=["plain", "tiled"])
def test_linear_is_lowered_for_the_platform(rows, tiled):
    weight = jnp.zeros((128, 256), jnp.bfloat16)
    weight = layers.in_tiles(weight) if tiled else weight
    x = jnp.zeros((1, rows, 256), jnp.bfloat16)
    tpu = topology.lower_for(layers.linear, topology.chip(), x, weight).as_text()
    cpu = topology.lower_for(layers.linear, jax.devices("cpu")[0], x, weight).as_text()
    assert tpu.count("stablehlo.dot_general") == 1
    assert "stablehlo.reduce" not in tpu
    assert tiled or "tensor<2x" not in tpu  # no halves of a weight; tiled, it has two tiles
    assert ("stablehlo.reduce" in cpu, "tensor<2x64x256x" in cpu) == (tiled, not tiled)


def test_parsers_see_what_they_guard_against():
    device = topology.chip()
    weight, x = jnp.zeros((128, 256)), jnp.zeros((256, 6))
    fused = topology.lower_for(lambda x, w: (w[:, :, None] * x[None]).sum(1), device, x, weight)
    assert weight.shape in summed_products(fused.as_text())
    write = topology.lower_for(lambda w, i: w.at[i, i].set(1.0), device, weight, jnp.arange(5))
    assert scattered(write.as_text()) == {(128, 256)}


HLO = """
%body (p: (bf16[1,6,9,64])) -> (bf16[1,6,9,64]) {
  %copy.1 = bf16[1,6,9,64]{3,2,1,0:T(8,128)} copy(%a), metadata={op_name="x"}
  %copy.2 = bf16[1,6,9,64]{3,2,1,0:T(8,128)S(3)} copy(%a)
  %transpose.1 = bf16[6,64,9]{2,1,0} transpose(%a), dimensions={0,2,1}
  %copy-start.1 = (bf16[1,6,9,64]{3,2,1,0}, bf16[1,6,9,64]{3,2,1,0:S(3)}, u32[]{:S(2)}) copy-start(%b)
  %slice.1 = bf16[1,6,9,64]{3,2,1,0} dynamic-update-slice(%a, %b, %c)
  %fusion.1 = bf16[1,6,9,64]{3,2,1,0} fusion(%a), kind=kLoop, calls=%rewrite
  %fusion.2 = bf16[1,6,9,64]{3,2,1,0} fusion(%a), kind=kLoop, calls=%write
}
%rewrite (p: bf16[1,6,9,64]) -> bf16[1,6,9,64] {
  ROOT %select.1 = bf16[1,6,9,64]{3,2,1,0} select(%p, %a, %b)
}
%write (p: bf16[1,6,9,64]) -> bf16[1,6,9,64] {
  ROOT %slice.2 = bf16[1,6,9,64]{3,2,1,0} dynamic-update-slice(%p, %a, %b)
}
ENTRY %main (p: bf16[1,6,9,64]) -> bf16[1,6,9,64] {
  %copy.9 = bf16[1,6,9,64]{3,2,1,0} copy(%p)
  %while.1 = (bf16[1,6,9,64]{3,2,1,0}) while(%t), condition=%cond, body=%body
}
"""


def test_copies_are_whole_writes_to_hbm_inside_the_loop():
    found = [instruction.name for instruction in topology.copies(HLO, (1, 6, 9, 64))]
    assert found == ["copy.1", "transpose.1", "fusion.1"]
    assert [i.name for i in topology.evictions(HLO, (1, 6, 9, 64))] == ["copy-start.1"]


def test_guard_notices_a_rewritten_cache():
    """A one-hot write in a loop, compiled: the guard must see what it is there to see."""

    def rewrite(cache):
        def step(carry):
            cache, i = carry
            hot = jnp.arange(cache.shape[2], dtype=jnp.int32)[None, None, :, None] == i
            return jnp.where(hot, cache * cache, cache), i + 1

        return jax.lax.while_loop(lambda c: c[1] < 9, step, (cache, jnp.int32(0)))[0]

    shape = (1, 64, 4096, 256)  # too large for on-chip memory
    cache = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    program = topology.compile_for(rewrite, topology.chip(), cache, donate_argnums=0)
    assert topology.copies(program.as_text(), shape)


def test_missing_libtpu_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs libtpu: pip install [^\n]*$"):
        topology.chip()
