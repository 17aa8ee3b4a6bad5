"""Texts with a model's own answers, to train heads on, from what --run_mode=infer wrote.

  python -m specjax.main --run_mode=infer --gin_file=configs/examples/smollm2_infer.gin \
      --gin.PROMPTS="'chat-prompts.jsonl'" --gin.INFER_OUTPUT_DIR="'said'" \
      --gin.run.Settings.include_tokens=True
  python scripts/build_answers.py --prompts=chat-prompts.jsonl --chat --said said --out=chat

  python scripts/build_answers.py --chats=sharegpt.jsonl --out=chat     # or what others answered

Writes OUT-train.npz and OUT-validation.npz (the lines' `split`; of chats a hash says it). Chats are OpenAI's
or ShareGPT's JSON lines, of which the assistant's turns are learned. Prompts are read as infer read them:
give --chat and --max_length as it had them. Folders of unfinished runs count with what is done. Answers
that repeat a prompt or an answer of HumanEval or of Spec-Bench (given its file) are left out.
"""

import argparse
import hashlib
import itertools
import json
import pathlib

import numpy as np
from etils import epath
from rich.progress import track

from specjax import pretrained
from specjax.data import chats, prompts
from specjax.data.sources import read_lines
from specjax.training import answers

HELD_OUT = 8  # of 256 chats
SPLITS = ("train", "validation")


def predictions(folder: pathlib.Path) -> list[dict]:
    """Lines of a finished file, or of the parts of an unfinished one."""
    files = sorted(folder.glob("*-predict.jsonl-*")) or sorted(folder.glob("tmp-*/part_*.jsonl"))
    return [json.loads(line) for file in files for line in read_lines(epath.Path(file))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", help="the file that was answered")
    parser.add_argument("--said", nargs="+", default=[], help="folders of infer")
    parser.add_argument("--chats", nargs="+", default=[], help="files of chats")
    parser.add_argument("--out", required=True, help="beginning of the two files' names")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--max_length", type=int, help="of a prompt, which lost its beginning")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--spec_bench", help="Spec-Bench's question.jsonl")
    options = parser.parse_args()
    if bool(options.said) != bool(options.prompts) or not (options.said or options.chats):
        parser.error("give --prompts with --said, or --chats")
    there = [
        file for split in SPLITS if (file := pathlib.Path(f"{options.out}-{split}.npz")).exists()
    ]
    for file in there:  # token streams of build_text.py have such names too
        with np.load(file) as arrays:
            if "answers" not in arrays:
                parser.error(f"{file} holds something else; choose another --out")
    vocabulary = pretrained.vocabulary(pretrained.locate(options.model))
    sets = [prompts.HumanEval()]
    sets += [prompts.SpecBench(options.spec_bench)] if options.spec_bench else []
    forbidden, left_out = prompts.excluded(*sets, answers=True), 0
    made = {split: answers.Answered([], []) for split in SPLITS}
    every = itertools.chain(said(options, vocabulary), chatted(options, vocabulary))
    for text, split, tokens, mine in track(every, "reading"):
        if forbidden.touches(text):
            left_out += 1
            continue
        made[split].tokens.append(tokens)
        made[split].answers.append(mine)
    for split, texts in made.items():
        answers.save(f"{options.out}-{split}.npz", texts)
        counted = sum(int(x.sum()) for x in texts.answers)
        print(f"{options.out}-{split}: {len(texts.tokens)} texts, {counted:,} tokens of answers")
    print(f"{left_out} left out that repeat a benchmark")


def said(options, vocabulary):
    """(answer, split, ids, which of them answer) of all that a model wrote."""
    if not options.said:
        return
    lines = [json.loads(x) for x in read_lines(epath.Path(options.prompts))]
    cut = dict(max_length=options.max_length, truncate=options.max_length is not None)
    source = prompts.PromptFile(options.prompts, chat=options.chat, **cut)
    asked = source.read(vocabulary)
    for line in itertools.chain(*map(predictions, map(pathlib.Path, options.said))):
        number, answer = int(line["inputs"]["id"]), np.asarray(line["prediction_tokens"], np.int32)
        tokens = np.concatenate([asked[number].inputs, answer])
        mine = np.arange(len(tokens)) >= len(tokens) - len(answer)
        yield line["prediction"], lines[number]["split"], tokens, mine


def chatted(options, vocabulary):
    """The same of chats."""
    for chat in itertools.chain(*map(chats.read, options.chats)):
        text = "\n".join(message.content for message in chat)
        held_out = hashlib.sha256(text.encode()).digest()[0] < HELD_OUT
        yield text, "validation" if held_out else "train", *chats.answers(vocabulary, chat)


if __name__ == "__main__":
    main()
