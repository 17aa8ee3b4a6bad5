"""Builds the Debian corpora: jsonl splits, SentencePiece vocabulary, token arrays, held-out sample.

    python scripts/build_debian.py                                  # fetches the indices with apt
    python scripts/build_debian.py --lists_dir=/var/lib/apt/lists   # uses indices that are there

Needs a Debian system whose apt knows a mirror. Stages whose files exist are skipped, so a run that
was interrupted goes on where it stopped. The shipped assets (vocabulary, held-out sample, train
digests) belong to one state of the archive: they are only written where they are missing, or with
--write_assets.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import rich
import rich.console
import rich.progress
import rich.table

from specjax.data import debian, samples, splits, vocabulary

PREFIXES = {"ende": debian.ENDE_PREFIX, "synopsis": debian.SYNOPSIS_PREFIX}
TASK_SPLITS = tuple(itertools.product(PREFIXES, splits.SPLITS))
VOCABULARY_SIZE = 8000
MAX_PIECES = 128  # with EOS
HELD_OUT_PER_HALF = 160
MIN_FETCHED_PAIRS = 10_000  # a third of what bookworm has; fewer: a mirror has failed
MIN_TARGET_PIECES = {"ende": 8, "synopsis": 4}  # without EOS
SplitCorpus = tuple[dict[str, dict[str, list[splits.Pair]]], dict[str, dict[str, int]]]
ASSETS = pathlib.Path(samples.__file__).parents[1] / "assets" / "debian"


class BuildError(Exception):
    """A reason to stop that the user can do something about; shown as one line."""


def fetch_indices(state_dir: pathlib.Path) -> pathlib.Path:
    """Lets apt fetch the indices into a directory of its own.

    Args:
      state_dir: Where lists, cache and state go.

    Returns:
      The list directory.

    Raises:
      BuildError: apt is missing, or brought no English and German descriptions.
    """
    lists_dir = state_dir / "lists"
    for folder in (lists_dir / "partial", state_dir / "cache" / "archives" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::Lists": lists_dir,
        "Dir::Cache": state_dir / "cache",
        "Acquire::Languages": "en,de",
        "APT::Update::Post-Invoke-Success::": "",  # hooks of the system are none of our business
        # As root, apt would drop to a user who may not write here.
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", *(f"-o{key}={value}" for key, value in options.items()), "update"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError("apt-get not found: the corpus is built on a Debian system") from error
    try:
        debian.find_indices(lists_dir)
    except FileNotFoundError as error:
        output = (result.stderr.strip() or result.stdout.strip()).splitlines()
        reason = output[-1] if output else "no message"
        raise BuildError(f"apt-get update brought {error} (apt: {reason})") from error
    return lists_dir


def write_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Writes beside the file and renames, so that what exists is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    write(partial)
    os.replace(partial, path)


def write_jsonl(path: pathlib.Path, rows: Iterable[dict[str, str]]) -> None:
    """Writes one JSON object a line, in UTF-8 as it is."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_jsonl(path: pathlib.Path) -> list[dict[str, str]]:
    """Inverse of `write_jsonl`."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def to_row(task: str, pair: splits.Pair) -> dict[str, str]:
    """The jsonl form of a pair: the input carries the task's prefix."""
    return {
        "source_package": pair.source_package,
        "inputs": PREFIXES[task] + pair.source,
        "targets": pair.target,
    }


def vocabulary_lines(kept: dict[str, dict[str, list[splits.Pair]]]) -> Iterator[str]:
    """Training text of the vocabulary, from the train splits alone.

    Descriptions repeat their boilerplate and would outweigh everything else: each paragraph comes
    once. German, the smaller language, comes twice.
    """
    for pair in kept["ende"]["train"]:
        yield debian.ENDE_PREFIX + pair.source
        yield pair.target
        yield pair.target
    for pair in kept["synopsis"]["train"]:
        yield pair.target
    parts = {part for pair in kept["synopsis"]["train"] for part in pair.parts}
    for part in sorted(parts):
        yield debian.SYNOPSIS_PREFIX + part


def tokenize(
    rows: Iterable[dict[str, str]], vocab: vocabulary.Vocabulary
) -> tuple[dict[str, np.ndarray], collections.Counter[str]]:
    """Token arrays of a split.

    Args:
      rows: Its jsonl rows.
      vocab: Vocabulary.

    Returns:
      Flat int32 `inputs` and `targets`, each example with its EOS, with int64 `*_offsets` [n + 1];
      and counts: examples, inputs truncated to 128 pieces, examples dropped because their target
      is longer than that.
    """
    flat: dict[str, list[int]] = {"inputs": [], "targets": []}
    offsets = {"inputs": [0], "targets": [0]}
    counts = collections.Counter(examples=0, truncated=0, too_long=0)
    for row in rows:
        inputs, targets = vocab.encode(row["inputs"]), vocab.encode(row["targets"])
        if len(targets) >= MAX_PIECES:
            counts["too_long"] += 1
            continue
        counts["examples"] += 1
        counts["truncated"] += len(inputs) >= MAX_PIECES
        for name, ids in (("inputs", inputs[: MAX_PIECES - 1]), ("targets", targets)):
            flat[name] += [*ids, vocab.eos_id]
            offsets[name].append(len(flat[name]))
    arrays = {name: np.asarray(ids, np.int32) for name, ids in flat.items()}
    arrays |= {f"{name}_offsets": np.asarray(o, np.int64) for name, o in offsets.items()}
    return arrays, counts


def held_out_rows(
    task: str, rows: Iterable[dict[str, str]], vocab: vocabulary.Vocabulary
) -> list[dict[str, str]]:
    """The sample that ships, drawn from the test split by `splits.held_out_sample`.

    Eligible are inputs that fit 128 pieces with EOS, and targets that fit as well and have at
    least 8 (ende) or 4 (synopsis) pieces without EOS.

    Args:
      task: "ende" or "synopsis".
      rows: Rows of the test split.
      vocab: Vocabulary that counts the pieces.

    Returns:
      Rows with their `half`: the calibration half, then the report half.

    Raises:
      BuildError: There are too few examples.
    """
    eligible = []
    for row in rows:
        length = len(vocab.encode(row["targets"]))
        fits = len(vocab.encode(row["inputs"])) < MAX_PIECES
        if fits and MIN_TARGET_PIECES[task] <= length < MAX_PIECES:
            text = row["inputs"].removeprefix(PREFIXES[task])
            eligible.append(splits.Pair(row["source_package"], text, row["targets"]))
    try:
        halves = splits.held_out_sample(eligible, HELD_OUT_PER_HALF)
    except ValueError as error:
        raise BuildError(f"{task}: {error}") from error
    return [
        {**to_row(task, pair), "half": half} for half, pairs in halves.items() for pair in pairs
    ]


def read_split_corpus(lists_dir: pathlib.Path | None, output_dir: pathlib.Path) -> SplitCorpus:
    """Reads and splits the corpus.

    Args:
      lists_dir: Indices to read; None for those that apt fetches, or fetched by an earlier run.
      output_dir: Where apt keeps its own directory.

    Returns:
      What `splits.split` returns.

    Raises:
      BuildError: There are no indices, or fetched ones are incomplete.
    """
    own = output_dir / "apt"
    try:
        pairs = debian.read_corpus(lists_dir or own / "lists")
    except FileNotFoundError as error:
        if lists_dir is not None:
            raise BuildError(str(error)) from error
        pairs = debian.read_corpus(fetch_indices(own))
    if lists_dir is None and len(pairs["ende"]) < MIN_FETCHED_PAIRS:
        raise BuildError(f"the indices in {own} are incomplete; delete it and try again")
    return splits.split(pairs)


def jsonl_path(output_dir: pathlib.Path, task: str, name: str) -> pathlib.Path:
    """File of a split."""
    return output_dir / f"{task}-{name}.jsonl"


def build_splits(corpus: Callable[[], SplitCorpus], output_dir: pathlib.Path) -> None:
    """Writes the jsonl files and the counts of dropped pairs."""
    for task, name in TASK_SPLITS:
        path = jsonl_path(output_dir, task, name)
        if not path.exists():
            write_jsonl(path, (to_row(task, pair) for pair in corpus()[0][task][name]))
    path = output_dir / "dropped.json"
    if not path.exists():
        text = json.dumps(corpus()[1], indent=2) + "\n"
        write_atomically(path, lambda partial: partial.write_text(text))


def build_vocabulary(
    corpus: Callable[[], SplitCorpus], assets: pathlib.Path, overwrite: bool
) -> None:
    """Trains the vocabulary that ships."""
    path = assets / "sentencepiece.model"
    if overwrite or not path.exists():
        lines = vocabulary_lines(corpus()[0])
        write_atomically(path, lambda partial: vocabulary.train(lines, partial, VOCABULARY_SIZE))


def build_tokens(output_dir: pathlib.Path, vocab: vocabulary.Vocabulary) -> None:
    """Writes token arrays and their counts."""
    for task, name in TASK_SPLITS:
        path = output_dir / "tokens" / f"{task}-{name}.npz"
        counts_path = path.with_suffix(".json")
        if path.exists() and counts_path.exists():
            continue
        arrays, counts = tokenize(read_jsonl(jsonl_path(output_dir, task, name)), vocab)
        write_atomically(counts_path, lambda p, c=counts: p.write_text(json.dumps(c) + "\n"))
        write_atomically(path, lambda p, a=arrays: save_arrays(p, a))


def save_arrays(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Saves an npz file under exactly this name."""
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def build_sample(
    corpus: Callable[[], SplitCorpus],
    output_dir: pathlib.Path,
    assets: pathlib.Path,
    vocab: vocabulary.Vocabulary,
    overwrite: bool,
) -> None:
    """Writes the sample that ships and the digests of what training has seen."""
    for task in PREFIXES:
        path = assets / f"{task}-heldout.jsonl"
        if overwrite or not path.exists():
            rows = read_jsonl(jsonl_path(output_dir, task, "test"))
            write_jsonl(path, held_out_rows(task, rows, vocab))
    path = assets / "train_digests.npy"
    if overwrite or not path.exists():
        train = itertools.chain.from_iterable(kept["train"] for kept in corpus()[0].values())
        digests = splits.pack_digests(splits.seen_digests(train))
        write_atomically(path, lambda partial: save_array(partial, digests))


def save_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Saves an npy file under exactly this name."""
    with path.open("wb") as file:
        np.save(file, array)


def summary(output_dir: pathlib.Path) -> rich.table.Table:
    """Counts and mean lengths in pieces (with EOS) of the token arrays."""
    table = rich.table.Table(title=f"Debian corpora in {output_dir}")
    for column in ("task", "split"):
        table.add_column(column, no_wrap=True)
    for column in ("examples", "truncated", "too long", "dropped", "inputs", "targets"):
        table.add_column(column, justify="right")
    dropped = json.loads((output_dir / "dropped.json").read_text())
    for task, name in TASK_SPLITS:
        path = output_dir / "tokens" / f"{task}-{name}.npz"
        counts = json.loads(path.with_suffix(".json").read_text())
        with np.load(path) as arrays:
            means = [np.diff(arrays[f"{side}_offsets"]).mean() for side in ("inputs", "targets")]
        numbers = [counts["examples"], counts["truncated"], counts["too_long"]]
        numbers.append(dropped[task].get(name, 0))
        table.add_row(task, name, *map(str, numbers), *(f"{mean:.1f}" for mean in means))
    return table


def build(args: argparse.Namespace) -> None:
    """Runs the stages."""
    output_dir, assets = args.output_dir.expanduser(), args.assets_dir
    # Read at most once, and only if a stage needs it.
    corpus = functools.cache(lambda: read_split_corpus(args.lists_dir, output_dir))
    vocabulary_path = assets / "sentencepiece.model"
    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as progress:
        stage = progress.add_task("splits", total=4)
        build_splits(corpus, output_dir)
        progress.update(stage, advance=1, description="vocabulary")
        build_vocabulary(corpus, assets, args.write_assets)
        progress.update(stage, advance=1, description="tokens")
        vocab = vocabulary.Vocabulary.load(vocabulary_path)
        build_tokens(output_dir, vocab)
        progress.update(stage, advance=1, description="held-out sample")
        build_sample(corpus, output_dir, assets, vocab, args.write_assets)
        progress.update(stage, advance=1, description="done")
    rich.print(summary(output_dir))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = pathlib.Path("~/.cache/specjax/debian_v001")
    add("--output_dir", type=pathlib.Path, default=default, help="default: %(default)s")
    add("--lists_dir", type=pathlib.Path, help="apt lists to read; default: fetched with apt-get")
    add("--assets_dir", type=pathlib.Path, default=ASSETS, help="where the shipped files lie")
    add("--write_assets", action="store_true", help="rewrite the shipped files")
    return parser.parse_args(argv)


def main() -> None:
    """Builds; a BuildError ends in one line."""
    try:
        build(parse_args())
    except BuildError as error:
        sys.exit(f"build_debian: {error}")


if __name__ == "__main__":
    main()
