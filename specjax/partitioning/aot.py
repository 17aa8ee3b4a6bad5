"""--run_mode=aot: compiles a decode or a training step for a TPU slice that is not there, and reads it.

What libtpu compiles is the program that would run: its memory, collectives and copies are facts. Times
are rooflines of the compiled steps: the larger of operations over peak and bytes over bandwidth, plus
what the collectives' results hold over the interconnect. Of a training step they are a lower bound: its
activations' traffic is not counted.
"""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.console import Console
from rich.table import Table

from specjax import runs
from specjax.decode import loop
from specjax.decode.interfaces import Block, Drafter, Params, Prompt
from specjax.decode.loop import Decoder
from specjax.decode.sampling import Sampling
from specjax.drafters.eagle import Pairwise
from specjax.drafters.small_model import SmallModel
from specjax.models import reads
from specjax.models.families import Network
from specjax.models.t5 import T5
from specjax.partitioning import chips, flop, topology
from specjax.partitioning import mesh as meshes
from specjax.partitioning.rules import Partitioner, Rule, standard
from specjax.training import loop as training
from specjax.training import placement

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
HOST = re.compile(
    r"\b(infeed|outfeed|send|recv|send-done|recv-done)\(|callback|is_host_transfer=true"
)


class Program(NamedTuple):
    """A compiled program, per device.

    Attributes:
      name: prefill or loop.
      compile_seconds: on this machine.
      arguments, temporaries, peak: bytes of HBM; the peak holds arguments, results and temporaries,
        what is updated in place once.
      collectives: kind to (count, bytes moved) where it counts: in the loop's body, per round.
      scatters: instructions that scatter.
      cache_copies: copies of a whole cache in the loop's body.
      host_operations: what would ask the host; must be none.
    """

    name: str
    compile_seconds: float
    arguments: int
    temporaries: int
    peak: int
    collectives: dict[str, tuple[int, int]]
    scatters: int
    cache_copies: int
    host_operations: int


class Step(NamedTuple):
    """A decoder step over one block, per device.

    Attributes:
      name: whose, and of how many tokens.
      flops: as the compiler counts them; of scanned layers, of which it counts one, those of all matrix
        products, shared out evenly.
      bytes: arguments and results, each moved once: weights and K/V. (The compiler's own count takes
        what is prefetched to on-chip memory twice.)
      collective_bytes: moved between devices.
      seconds: the roofline.
    """

    name: str
    flops: float
    bytes: float
    collective_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What was compiled for where.

    Attributes:
      slice: the slice's name.
      mesh: its axes and their sizes.
      settings: what was asked for.
      programs: prefill and loop, or the training step.
      steps: the plain step, the verify step and the draft's steps.
      held: bytes on one device of parameters that only prefill reads (encoders, cross-attention's keys
        and values).
      memory: HBM of a chip.
      c, v: draft step and verify step over a plain step, from the rooflines; None without a draft.
      smallest: the smallest slice of this chip that holds it.
    """

    slice: str
    mesh: dict[str, int]
    settings: dict[str, Any]
    programs: list[Program]
    steps: list[Step]
    held: int
    memory: int
    c: float | None
    v: float | None
    smallest: str | None

    @property
    def peak(self) -> int:
        """Bytes of HBM on a device while it runs."""
        *first, last = self.programs
        return max([last.peak + self.held, *(program.peak for program in first)])

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory


def decode(
    target: Network,
    draft: Network | None = None,
    drafter: Callable[..., Drafter] | None = None,
    topology_name: str = "v4-8",
    num_partitions: int = 1,
    submesh: tuple[int, ...] | None = None,
    rules: tuple[Rule, ...] = standard(),
    draft_whole: bool | None = None,
    batch_size: int = 1,
    input_length: int = 128,
    max_decode_len: int = 128,
    dtype: str = "bfloat16",
    output_dir: str | None = None,
) -> Compiled:
    """Compiles prefill and loop of a decode for a slice that need not be there.

    Args:
      target, draft: the models; their weights are never made.
      drafter: makes the drafter, called with ``model=draft``; None decodes plainly.
      topology_name: a slice, e.g. v4-8.
      num_partitions, submesh: see `specjax.partitioning.mesh.make`.
      rules: logical axes to axes of the mesh.
      draft_whole: whether every device holds the whole draft; None where its heads do not divide.
      batch_size: rows, over all devices.
      input_length, max_decode_len: tokens.
      dtype: of the parameters.
      output_dir: aot.json and aot.md are written there; None writes nothing.

    Returns:
      What was found; it is also printed.

    Raises:
      ValueError: no such slice, the mesh does not fit it, or rows do not divide, or libtpu is not
        installed.
    """
    settings = dict(locals())
    if drafter is not None and draft is None:
        raise ValueError("a drafter is named, but not its draft: set DRAFT")
    where, partitioner = _devices(topology_name, num_partitions, submesh, rules, batch_size)
    mesh = partitioner.mesh
    job = _Decode(target, draft, drafter, partitioner, draft_whole, dtype)
    arguments = job.arguments(batch_size, input_length, max_decode_len)
    compile = functools.partial(_compile, where=where, split=mesh.shape["model"])
    prefill, run, state = _programs(compile, *arguments)
    steps = job.steps(arguments, state, where.chip)
    held = sum(_only_prefill(params) for params in arguments[1] if params is not None)
    found = Compiled(
        where.name,
        dict(mesh.shape),
        {name: _said(value) for name, value in settings.items() if name != "output_dir"},
        [prefill, run],
        steps,
        held,
        where.chip.memory,
        *_ratios(steps, arguments[0]),
        None,
    )
    found = dataclasses.replace(found, smallest=_smallest(found, where, mesh.shape["model"]))
    return _report(found, output_dir)


def train(
    recipe: Any,
    lengths: Mapping[str, int],
    topology_name: str = "v4-64",
    num_partitions: int = 1,
    submesh: tuple[int, ...] | None = None,
    parameter_partitioning_dims: int = 2,
    optimizer: str = "adafactor",
    batch_size: int = 128,
    output_dir: str | None = None,
) -> Compiled:
    """Compiles a training step for a slice that need not be there.

    Args:
      recipe: what is trained on which loss; it reads what `SeqioBatches` gives.
      lengths: ``{"inputs": …, "targets": …}``.
      topology_name, num_partitions, submesh: as for `decode`.
      parameter_partitioning_dims: see `specjax.partitioning.rules.standard`.
      optimizer: see `specjax.training.loop.train`.
      batch_size: rows, over all devices.
      output_dir: as for `decode`.

    Returns:
      What was found; it is also printed.

    Raises:
      ValueError: no such slice, the mesh does not fit it, or rows do not divide, or libtpu is not
        installed.
    """
    settings = dict(locals())
    where, partitioner = _devices(
        topology_name, num_partitions, submesh, standard(parameter_partitioning_dims), batch_size
    )
    mesh = partitioner.mesh
    update = training.make_optimizer(optimizer, training.Schedule())
    step = training.make_step(recipe, update)
    state, batch = _training(recipe, update, partitioner, lengths, batch_size)
    began = time.perf_counter()
    with placement.using(partitioner):
        compiled = _compile(step.lower(state, batch), where, mesh.size)
    program = _program("step", compiled, time.perf_counter() - began, (), whole=True)
    flops = compiled.cost_analysis()["flops"]
    if recipe.model.config.scan_layers:
        with placement.using(partitioner):
            flops = flop.of(step, state, batch) / mesh.size
    moved = sum(size for _, size in program.collectives.values())
    once = 2 * program.arguments  # parameters and optimizer, read and written
    seconds = max(flops / where.chip.flops, once / where.chip.bandwidth)
    seconds += moved / where.chip.interconnect
    size = f"step, {batch_size} examples"
    found = Compiled(
        where.name,
        dict(mesh.shape),
        {name: _said(value) for name, value in settings.items() if name != "output_dir"},
        [program],
        [Step(size, flops, once, moved, seconds)],
        0,
        where.chip.memory,
        None,
        None,
        None,
    )
    found = dataclasses.replace(found, smallest=_smallest(found, where, mesh.size))
    return _report(found, output_dir)


def _devices(
    topology_name: str, num_partitions: int, submesh, rules: tuple[Rule, ...], batch_size: int
) -> tuple[chips.Slice, Partitioner]:
    """The slice, and its devices as a mesh that divides the rows."""
    where = chips.parse(topology_name)
    mesh = meshes.make(num_partitions, submesh, topology.devices(where.topology))
    partitioner = Partitioner(mesh, rules)
    partitioner.check_rows(batch_size)
    return where, partitioner


def _training(recipe, update, partitioner: Partitioner, lengths, batch_size: int) -> tuple:
    """Abstract state and batch of a training step."""

    def fresh() -> training.TrainState:
        params = recipe.init(jax.random.key(0))
        noise = jax.random.key_data(jax.random.key(1))
        return training.TrainState(params, update.init(params), jnp.zeros((), jnp.int32), noise)

    state = jax.eval_shape(fresh)
    state = placement.shapes(
        state, placement.state_shardings(partitioner, recipe.model, update, state)
    )
    shape = {"inputs": lengths["inputs"], "input_mask": lengths["inputs"]}
    shape |= dict.fromkeys(("decoder_inputs", "targets", "weights"), lengths["targets"])
    kinds = {"input_mask": jnp.bool_, "weights": jnp.float32}
    row = lambda name: jax.ShapeDtypeStruct(  # noqa: E731
        (batch_size, shape[name]), kinds.get(name, jnp.int32), sharding=partitioner.rows
    )
    return state, {name: row(name) for name in shape}


def run(job: Callable[[], Compiled]) -> Compiled:
    """``--run_mode=aot``: one of `decode` and `train`, with its bindings."""
    return job()


@dataclasses.dataclass(frozen=True)
class _Decode:
    """What is compiled, and where it lies."""

    target: Network
    draft: Network | None
    drafter: Callable[..., Drafter] | None
    partitioner: Partitioner
    draft_whole: bool | None
    dtype: str

    def arguments(self, batch: int, length: int, limit: int) -> tuple[Decoder, Params, Prompt, Any]:
        """Decoder, parameters, prompt and keys, all abstract."""
        drafter = None if self.drafter is None else self.drafter(model=self.draft)
        decoder = Decoder(self.target, limit, drafter, mesh=self.partitioner.mesh)
        params = Params(
            self._params(self.target, None),
            None if drafter is None else self._params(self.draft, self.draft_whole),
        )
        prompt = Prompt(self.rows((batch, length)), self.rows((batch,)))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
        return decoder, params, prompt, self.rows(keys.shape, keys.dtype)

    def _params(self, model: Network, whole: bool | None) -> PyTree:
        abstract = model.abstract(jnp.dtype(self.dtype))
        return placement.shapes(abstract, self.partitioner.params(model, whole))

    def rows(self, shape: tuple[int, ...], dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.partitioner.rows)

    def steps(self, arguments: tuple, state: loop.State, chip: chips.Chip) -> list[Step]:
        """The steps that a round is made of, each compiled by itself: no loop hides its costs."""
        decoder, params, _, _ = arguments
        step = functools.partial(self._step, decoder, chip=chip)
        found = [step("plain", self.target, params.target, state.cache, 1)]
        if decoder.drafter is None:
            return found
        nodes = decoder.drafter.nodes
        found.append(step("verify", self.target, params.target, state.cache, nodes + 1))
        if not isinstance(decoder.drafter, SmallModel):
            return [*found, self._proposal(arguments, state, chip)]
        cache = state.drafter.cache
        found += [step("draft", self.draft, params.draft, cache, size) for size in (2, 1)]
        return found

    def _step(self, decoder, name, model, params, cache, size: int, chip) -> Step:
        batch = cache.length.shape[0]
        block = Block(
            self.rows((batch, size)),
            self.rows((batch, size)),
            self.rows((batch, size, size), jnp.bool_),
        )

        one = loop.apart(decoder, model.extend, (loop.WHOLE, loop.ROWS, loop.ROWS), loop.ROWS)
        scanned = self._flops(one, params, cache, block) if model.config.scan_layers else None
        label = f"{name}, {size} token{'s' if size > 1 else ''}"
        compiled = jax.jit(one).lower(params, cache, block).compile()
        return _roofline(label, compiled, _unread(params), chip, scanned)

    def _proposal(self, arguments: tuple, state: loop.State, chip) -> Step:
        """All that a round's draft takes, as one program."""
        decoder, params, prompt, _ = arguments
        drafter = decoder.drafter

        def propose(params, drafted, text, sampling, keys):
            return drafter.propose(params, drafted, text, sampling, keys)[0]

        places = (loop.WHOLE, *[loop.ROWS] * 4)
        one = loop.apart(decoder, propose, places, loop.ROWS)
        temperature = self.rows(prompt.length.shape, jnp.float32)
        given = (Params(None, params.draft), state.drafter, state.text, Sampling(temperature))
        compiled = jax.jit(one).lower(*given, state.keys).compile()
        label = f"draft, {drafter.nodes} node{'s' if drafter.nodes > 1 else ''}"
        # EAGLE's heads read their weights once a level.
        passes = drafter.depth if isinstance(drafter, Pairwise) else 1
        again = (passes - 1) * sum(_bytes(leaf) for leaf in reads.whole(params.draft))
        return _roofline(label, compiled, _unread(params.draft) - again, chip)

    def _flops(self, function, *arguments) -> float:
        """One device's, where the compiler counts one of the scanned layers."""
        return flop.of(function, *arguments) / self.partitioner.mesh.shape["model"]


def _roofline(
    label: str, compiled, unread: int, chip: chips.Chip, scanned: float | None = None
) -> Step:
    """A compiled step's operations and bytes, and how fast they could be.

    Args:
      label: of the step.
      compiled: for the chip.
      unread: bytes of its arguments that it does not read, less those that it reads again.
      chip: the chip.
      scanned: its operations, where the compiler cannot count them.
    """
    flops = compiled.cost_analysis()["flops"] if scanned is None else scanned
    held: Any = compiled.memory_analysis()
    read = held.argument_size_in_bytes + held.output_size_in_bytes - unread
    text = compiled.as_text()
    moved = collectives(list(topology.instructions(text)), topology.turns(text))
    total = sum(moved_bytes for _, moved_bytes in moved.values())
    seconds = max(flops / chip.flops, read / chip.bandwidth) + total / chip.interconnect
    return Step(label, flops, read, total, seconds)


def _compile(lowered: jax.stages.Lowered, where: chips.Slice, split: int) -> jax.stages.Compiled:
    """Compiles; what the compiler has no room for is one line.

    Args:
      lowered: the program.
      where: the slice.
      split: over how many of its chips what it holds is split.

    Raises:
      ValueError: it does not fit.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"\(([\d.]+)([MG])\) exceeds available HBM \(([\d.]+)G\)", str(error))
        if found is None:
            raise
        needed = float(found[1]) * (chips.GIB if found[2] == "G" else 2**20)
        larger = _large_enough(needed, where, split)
        raise ValueError(
            f"it does not fit {where.name}: temporaries alone need {needed / chips.GIB:.1f} of "
            f"{found[3]} GiB on every chip; by estimate "
            + (f"the smallest slice that holds it is {larger}" if larger else "no slice holds it")
            + " (training: or set REMAT_POLICY)"
        ) from None


def _large_enough(peak: float, where: chips.Slice, split: int) -> str | None:
    """The smallest larger slice, if what is split goes on being split as the slice grows."""
    for larger in where.larger[1:]:
        if peak * split / larger.chips <= 0.95 * where.chip.memory:
            return larger.name
    return None


def _programs(compile, decoder, params, prompt, keys) -> tuple[Program, Program, loop.State]:
    began = time.perf_counter()
    first = compile(loop.jit_start.lower(decoder, params, prompt, keys))
    prefill = _program("prefill", first, time.perf_counter() - began, (), whole=True)
    state = jax.eval_shape(functools.partial(loop.jit_start, decoder), params, prompt, keys)
    state = placement.shapes(state, first.output_shardings)
    temperature = jax.ShapeDtypeStruct(
        prompt.length.shape, jnp.float32, sharding=prompt.length.sharding
    )
    began = time.perf_counter()
    second = compile(loop.jit_run.lower(decoder, params, state, Sampling(temperature)))
    took = time.perf_counter() - began
    return prefill, _program("loop", second, took, _cache_shapes(state), whole=False), state


def _program(name: str, compiled, seconds: float, shapes, whole: bool) -> Program:
    text, size = compiled.as_text(), compiled.memory_analysis()
    every = list(topology.instructions(text))
    return Program(
        name,
        seconds,
        size.argument_size_in_bytes,
        size.temp_size_in_bytes,
        topology.memory_bytes(compiled),
        collectives(every if whole else topology.loop_body(text), topology.turns(text)),
        sum(i.opcode == "scatter" for i in every),
        sum(len(topology.copies(text, shape)) for shape in shapes),
        len(HOST.findall(text)),
    )


def collectives(
    body: list[topology.Instruction], turns: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Kind to (count, bytes of their results), each started one once.

    Args:
      body: instructions.
      turns: how often each computation runs (`topology.turns`); once, if it is not in it.
    """
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for instruction in body:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            arrays = topology.results(instruction)
            if instruction.opcode == "all-gather-start":
                arrays = arrays[len(arrays) // 2 :]  # operands, then results
            elif instruction.opcode == "collective-permute-start":
                arrays = arrays[1:2]  # operand, result, contexts
            times = turns.get(instruction.computation, 1)
            found[kind][0] += times
            found[kind][1] += times * sum(_type_bytes(array) for array in arrays)
    return {kind: (count, size) for kind, (count, size) in sorted(found.items())}


def _type_bytes(array: str) -> int:
    kind, sizes = re.match(r"([a-z0-9]+)\[([0-9,]*)\]", array).groups()
    width = 1 if kind == "pred" else int(re.search(r"\d+", kind)[0]) / 8
    return int(math.prod(int(n) for n in sizes.split(",") if n) * width)


def _cache_shapes(state: loop.State) -> set[tuple[int, ...]]:
    """Shapes, on one device, of all keys and values."""
    held = [state.cache] + ([state.drafter.cache] if hasattr(state.drafter, "cache") else [])
    leaves = jax.tree.leaves([(cache.kv, cache.cross) for cache in held])
    return {leaf.sharding.shard_shape(leaf.shape) for leaf in leaves}


def _ratios(steps: list[Step], decoder: Decoder) -> tuple[float | None, float | None]:
    """c and v: a round of a small model drafts one block of two tokens and gamma - 1 of one."""
    if len(steps) == 1:
        return None, None
    plain, verify, *drafts = (step.seconds for step in steps)
    gamma, whole = decoder.drafter.depth, drafts[0]
    if len(drafts) > 1:
        whole += (gamma - 1) * drafts[1]
    return whole / gamma / plain, verify / plain


def _smallest(found: Compiled, where: chips.Slice, split: int) -> str | None:
    """The smallest slice that holds it, if what is split goes on being split as the slice grows.

    Larger ones are reckoned, not compiled.

    Args:
      found: what was compiled.
      where: for which slice.
      split: over how many chips what it holds was split.
    """
    return where.name if found.fits else _large_enough(found.peak, where, split)


def _only_prefill(params: PyTree) -> int:
    """Bytes of parameters that the loop has no use for, but which lie there: it ends at prefill."""
    return sum(_bytes(x) for path, x in reads.leaves(params) if reads.by_prefill_alone(path))


def _unread(params: PyTree) -> int:
    """Bytes of tables of which a step reads a row per token."""
    return sum(_bytes(leaf) for leaf in reads.looked_up(params))


def _bytes(leaf) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _said(value) -> Any:
    """A setting as the report shows it."""
    if isinstance(value, T5):
        c = value.config
        depth = f"{c.num_encoder_layers} + {c.num_decoder_layers}"
        return f"T5 {c.emb_dim} wide, {c.num_heads} heads, {depth} layers"
    if isinstance(value, Network):
        c = value.config
        return (
            f"{type(value).__name__} {c.emb_dim} wide, {c.num_heads} heads, {c.num_layers} layers"
        )
    return value if isinstance(value, int | str | None) else repr(value)


def _report(found: Compiled, output_dir: str | None) -> Compiled:
    show(found)
    if output_dir is not None:
        write(found, pathlib.Path(runs.local(output_dir, "reports")))
    return found


def lines(found: Compiled) -> list[str]:
    """What is said in words."""
    gib = chips.GIB
    out = [
        f"{found.peak / gib:.2f} of {found.memory / gib:.2f} GiB on every chip of {found.slice}"
        f" ({', '.join(f'{n} {k}' for k, n in found.mesh.items())})"
    ]
    if not found.fits:
        out[0] += ": it does not fit; " + (
            f"by estimate the smallest slice that holds it is {found.smallest}, split over all its chips"
            if found.smallest
            else "no slice of this chip holds it"
        )
    if any(p.host_operations for p in found.programs):
        out.append("the loop asks the host, which it must not")
    if found.c is not None:
        out.append(f"from the rooflines: c = {found.c:.4f}, v = {found.v:.3f}")
    return out


def tables(found: Compiled) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows): programs, then steps."""
    gib = chips.GIB
    programs = [
        [
            p.name,
            f"{p.compile_seconds:.0f}",
            *(f"{x / gib:.2f}" for x in (p.arguments, p.temporaries, p.peak)),
            moved(p.collectives),
            str(p.scatters),
            str(p.cache_copies),
            str(p.host_operations),
        ]
        for p in found.programs
    ]
    columns = [
        "program", "compile s", "arguments GiB", "temporaries GiB", "peak GiB",
        "collectives (loop: a round)", "scatters", "cache copies", "host",
    ]  # fmt: skip
    steps = [
        [
            s.name,
            f"{s.flops / 1e9:.1f}",
            f"{s.bytes / 1e9:.3f}",
            f"{s.collective_bytes / 1e6:.2f}",
            f"{s.seconds * 1e3:.3f}",
        ]
        for s in found.steps
    ]
    return [
        ("programs, per chip", columns, programs),
        ("steps, per chip", ["step", "GFLOP", "GB", "collectives MB", "roofline ms"], steps),
    ]


def moved(collectives: Mapping[str, tuple[int, int]]) -> str:
    """What moves between chips, in words."""
    parts = [f"{n} {kind} ({size / 1e6:.2f} MB)" for kind, (n, size) in collectives.items()]
    return ", ".join(parts) or "none"


def show(found: Compiled) -> None:
    """Prints the report."""
    console = Console(width=None if sys.stdout.isatty() else 130)
    for title, columns, rows in tables(found):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in lines(found):
        console.print(line, highlight=False)


def write(found: Compiled, folder: pathlib.Path) -> None:
    """Writes aot.json and aot.md."""
    folder.mkdir(parents=True, exist_ok=True)
    content = dataclasses.asdict(found) | {
        "programs": [p._asdict() for p in found.programs],
        "steps": [s._asdict() for s in found.steps],
        "fits": found.fits,
        "peak": found.peak,
    }
    (folder / "aot.json").write_text(json.dumps(content, indent=1))
    text = [f"# {found.slice}", "", *lines(found)]
    for title, columns, rows in tables(found):
        text += [
            "",
            f"## {title}",
            "",
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
        ]
        text += ["| " + " | ".join(row) + " |" for row in rows]
    (folder / "aot.md").write_text("\n".join(text) + "\n")
