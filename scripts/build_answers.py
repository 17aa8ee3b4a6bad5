"""Texts with a model's own answers, to train heads on, from what --run_mode=infer wrote.

  python -m specjax.main --run_mode=infer --gin_file=configs/examples/smollm2_infer.gin \
      --gin.PROMPTS="'chat-prompts.jsonl'" --gin.INFER_OUTPUT_DIR="'said'" \
      --gin.run.Settings.include_tokens=True
  python scripts/build_answers.py --prompts=chat-prompts.jsonl --chat --said said --out=chat

Writes OUT-train.npz and OUT-validation.npz (the lines' `split`). Prompts are read as infer read them: give
--chat and --max_length as it had them. Folders of unfinished runs count with what is done. Answers that
repeat a prompt or an answer of HumanEval or of Spec-Bench (given its file) are left out.
"""

import argparse
import json
import pathlib

import numpy as np
from rich.progress import track

from specjax import pretrained
from specjax.data import prompts
from specjax.training import answers


def predictions(folder: pathlib.Path) -> list[dict]:
    """Lines of a finished file, or of the parts of an unfinished one."""
    files = sorted(folder.glob("*-predict.jsonl-*")) or sorted(folder.glob("tmp-*/part_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="the file that was answered")
    parser.add_argument("--said", required=True, nargs="+", help="folders of infer")
    parser.add_argument("--out", required=True, help="beginning of the two files' names")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--max_length", type=int, help="of a prompt, which lost its beginning")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--spec_bench", help="Spec-Bench's question.jsonl")
    options = parser.parse_args()
    vocabulary = pretrained.vocabulary(pretrained.locate(options.model))
    lines = [json.loads(x) for x in pathlib.Path(options.prompts).read_text("utf-8").splitlines()]
    cut = dict(max_length=options.max_length, truncate=options.max_length is not None)
    source = prompts.PromptFile(options.prompts, chat=options.chat, **cut)
    asked = source.read(vocabulary)
    sets = [prompts.HumanEval()]
    sets += [prompts.SpecBench(options.spec_bench)] if options.spec_bench else []
    forbidden, left_out = prompts.excluded(*sets, answers=True), 0
    made = {split: answers.Answered([], []) for split in ("train", "validation")}
    said = [line for folder in options.said for line in predictions(pathlib.Path(folder))]
    for line in track(said, "reading"):
        number, answer = int(line["inputs"]["id"]), line["prediction_tokens"]
        if forbidden.touches(line["prediction"]):
            left_out += 1
            continue
        given, split = asked[number].inputs, made[lines[number]["split"]]
        split.tokens.append(np.concatenate([given, np.asarray(answer, np.int32)]))
        split.answers.append(np.arange(len(given) + len(answer)) >= len(given))
    for split, texts in made.items():
        answers.save(f"{options.out}-{split}.npz", texts)
        counted = sum(int(x.sum()) for x in texts.answers)
        print(f"{options.out}-{split}: {len(texts.tokens)} texts, {counted:,} tokens of answers")
    print(f"{left_out} left out that repeat a benchmark")


if __name__ == "__main__":
    main()
