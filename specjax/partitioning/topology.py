"""Described TPUs: lower and compile for a TPU on a machine that has none, and read the result.

libtpu compiles for a chip it is only told of. What it compiles is the program that would run, so its
memory and its instructions can be tested on any machine.
"""

import collections
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

# Without these libtpu asks a metadata server which TPU it is on. They must stand before it loads.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
V4_HBM_BYTES = 32 * 2**30

# Opcodes that write no buffer of their own: they name one, or write a slice where it lies. The end
# of an asynchronous copy is counted at its start, what a called computation does inside of that.
IN_PLACE = {
    "bitcast",
    "call",
    "conditional",
    "copy-done",
    "dynamic-update-slice",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
}


class Instruction(NamedTuple):
    """One line of compiled HLO.

    Attributes:
      computation: name of the computation it stands in.
      name: its own.
      type: its result's, layout and memory space included.
      opcode: e.g. ``dynamic-update-slice``.
      rest: operands, attributes and metadata.
    """

    computation: str
    name: str
    type: str
    opcode: str
    rest: str


# Devices and compiling.


def devices(name: str = "v4:1x1x1") -> list[jax.Device]:
    """The devices of a described TPU slice, one per chip.

    Args:
      name: generation and chips along each axis, e.g. ``v4:2x2x1`` or ``v5e:2x4``.

    Raises:
      ValueError: libtpu is not installed, or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a described TPU needs libtpu: pip install specjax[tpu]")
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    extent = tuple(int(n) for n in name.partition(":")[2].split("x"))
    bounds = tuple(min(n, 2) for n in extent)
    bounds = (*bounds, 1) if len(bounds) == 2 else (*bounds[:2], 1)
    options = dict(chips_per_host_bounds=bounds, num_slices=1)
    if name.startswith("v4"):
        options["chip_config_name"] = "megacore"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu knows no {name}: {str(error).splitlines()[0]}") from None
    return found.devices


def chip(name: str = "v4") -> jax.Device:
    """One described chip of a TPU generation."""
    return devices(f"{name}:1x1x1")[0]


def place(tree: PyTree, device: jax.Device) -> PyTree:
    """Arrays or their shapes as abstract arrays on one device; other leaves as they are."""
    sharding = SingleDeviceSharding(device)

    def of(leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(of, tree)


def lower_for(function: Callable, device: jax.Device, *args, **options) -> jax.stages.Lowered:
    """Lowers a function for one device, which need not exist.

    Args:
      function: what to lower; one that is compiled by `jax.jit` already keeps its own options.
      device: e.g. `chip`'s.
      *args: arrays, their shapes, or static values.
      **options: of `jax.jit`, e.g. ``static_argnums``, ``donate_argnums``.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function, **options)
    return jitted.lower(*place(args, device))


def compile_for(function: Callable, device: jax.Device, *args, **options) -> jax.stages.Compiled:
    """Lowers and compiles a function for one device, which need not exist. See `lower_for`."""
    return lower_for(function, device, *args, **options).compile()


# What was compiled.


def memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory while the program runs: arguments, outputs and temporaries, aliases once.

    Arguments the program does not use are dropped by `jax.jit` and not counted.
    """
    size: Any = compiled.memory_analysis()
    held = size.argument_size_in_bytes + size.output_size_in_bytes + size.temp_size_in_bytes
    return held - size.alias_size_in_bytes


def instructions(hlo_text: str) -> Iterator[Instruction]:
    """All instructions of a compiled program's text, fused ones included."""
    computation = ""
    for line in hlo_text.splitlines():
        if not line.startswith(" "):
            head = re.match(r"(?:ENTRY )?%(\S+)", line)
            computation = head[1] if head else computation
            continue
        found = re.match(r" +(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", line)
        if found:
            yield Instruction(computation, *found.groups())


def loop_body(hlo_text: str) -> list[Instruction]:
    """Instructions that run in every turn of a while loop, and loops and branches inside of it.

    A fusion counts as one instruction, without what is fused.
    """
    by_computation: dict[str, list[Instruction]] = {}
    for instruction in instructions(hlo_text):
        by_computation.setdefault(instruction.computation, []).append(instruction)
    everything = [i for inside in by_computation.values() for i in inside]
    waiting = [name for i in everything if i.opcode == "while" for name in called(i)]
    seen: dict[str, list[Instruction]] = {}
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen[name] = by_computation.get(name, [])
            waiting += [n for i in seen[name] if i.opcode != "fusion" for n in called(i)]
    return [i for inside in seen.values() for i in inside]


def turns(hlo_text: str) -> dict[str, int]:
    """How often each computation runs; a loop whose turns are not known before counts as one turn.

    Args:
      hlo_text: `jax.stages.Compiled.as_text`.

    Returns:
      Computation's name to count; those that nothing calls are not in it.
    """
    inside: dict[str, list[Instruction]] = {}
    for instruction in instructions(hlo_text):
        inside.setdefault(instruction.computation, []).append(instruction)
    entry = re.search(r"^ENTRY %(\S+)", hlo_text, re.MULTILINE)
    counts: dict[str, int] = collections.Counter()

    def add(name: str, times: int) -> None:
        counts[name] += times
        for instruction in inside.get(name, []):
            callees = called(instruction)
            more = _turns(inside, callees) if instruction.opcode == "while" else 1
            for callee in callees:
                add(callee, times * more)

    if entry:
        add(entry[1], 1)
    return counts


def _turns(inside: dict[str, list[Instruction]], callees: list[str]) -> int:
    """Turns of a counted loop, as `lax.scan` makes it: its condition is that a counter from 0 is below
    a constant. 1 for any other loop."""
    everything = [i for name in callees for i in inside.get(name, [])]
    scalars = [i for i in everything if i.opcode == "constant" and i.type.startswith("s32[]")]
    limits = {(i.computation, i.name): int(i.rest.partition(")")[0]) for i in scalars}
    for i in everything:
        below = i.opcode == "compare" and re.search(r"%[^,]+, %([^)]+)\).*direction=LT", i.rest)
        if below and (i.computation, below[1]) in limits:
            return max(1, limits[i.computation, below[1]])
    return 1


def called(instruction: Instruction) -> list[str]:
    """Names of the computations an instruction runs."""
    named = re.findall(r"(?:body|condition|calls|to_apply)=%([^\s,)]+)", instruction.rest)
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
    return named + (re.findall(r"%([^\s,]+)", branches[1]) if branches else [])


def copies(hlo_text: str, shape: tuple[int, ...]) -> list[Instruction]:
    """Instructions of the loop body that write a whole buffer of a shape to HBM.

    On-chip memory (a layout with ``S(n)``) is another matter: what goes there is a prefetch, and
    what comes from there is the end of a stay (see `evictions`). Axes may be permuted, axes of size
    1 are ignored. A slice written in place is no copy, a scatter is one.

    Args:
      hlo_text: `jax.stages.Compiled.as_text`.
      shape: e.g. the key/value cache's.

    Returns:
      The instructions, none if all is well.
    """
    writers = [i for i in loop_body(hlo_text) if in_hbm(results(i)[:1], shape)]
    sliced = _slice_writers(hlo_text)
    return [
        i
        for i in writers
        if i.opcode not in IN_PLACE
        and not _from_chip(i)
        and not (i.opcode == "fusion" and set(called(i)) & sliced)
    ]


def evictions(hlo_text: str, shape: tuple[int, ...]) -> list[Instruction]:
    """Copies in the loop body of a whole buffer of a shape from on-chip memory to HBM.

    The compiler updates a buffer that fits on chip there, and writes it back whole.
    """
    body = loop_body(hlo_text)
    return [i for i in body if _from_chip(i) and in_hbm(results(i)[:1], shape)]


def results(instruction: Instruction) -> list[str]:
    """The arrays an instruction returns, e.g. ``bf16[1,6,135,64]{2,3,1,0:T(8,128)(2,1)}``."""
    return re.findall(r"[a-z][a-z0-9]*\[[0-9,]*\](?:\{[^}]*\})?", instruction.type)


def in_hbm(types: list[str], shape: tuple[int, ...]) -> bool:
    """Whether an array of a shape, in any order of its axes, is among them and lies in HBM."""
    return any(_axes(t) == sorted(n for n in shape if n != 1) and "S(" not in t for t in types)


def _axes(type: str) -> list[int]:
    sizes = re.search(r"\[([0-9,]*)\]", type)[1]
    return sorted(int(n) for n in sizes.split(",") if n not in ("", "1"))


def _from_chip(instruction: Instruction) -> bool:
    """Whether it starts a copy whose source lies in on-chip memory: (target, source, context)."""
    return instruction.opcode == "copy-start" and "S(" in results(instruction)[1]


def _slice_writers(hlo_text: str) -> set[str]:
    """Fused computations that end in writing a slice where it lies."""
    return {i.computation for i in instructions(hlo_text) if i.opcode == "dynamic-update-slice"}
