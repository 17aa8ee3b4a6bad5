"""Tokenizers of decoder-only models, from a Hugging Face folder or a GGUF file.

Byte-level BPE (GPT-2, SmolLM2, Llama 3, Qwen2, OPT) and SentencePiece's BPE with bytes for what it
does not know (Llama 1 and 2, Vicuna, TinyLlama). The library ``tokenizers`` encodes; decoding is
done here, byte by byte, because the library replaces more than what is no UTF-8, and because a
stream of text needs it.
"""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tokenizers as library
from jaxtyping import Int32
from tokenizers import models, normalizers, pre_tokenizers

from specjax.checkpoints import gguf
from specjax.data.vocabulary import Base, entries

# What bytes a piece stands for.
_Content = Callable[[str], bytes]

_SPACE = "▁"  # how SentencePiece writes it
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTES = range(1, 7)

# Where a text is cut before BPE. Each pattern cuts what those before it have left.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NEWER_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {
    "gpt-2": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "llama-bpe": (_NEWER_WORDS.format(digits="{1,3}"),),
    "qwen2": (_NEWER_WORDS.format(digits=""),),
    # llama.cpp's own, for files that do not say how.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_WHOLE_WORDS = ("llama-bpe",)  # a word that is a piece stays one, whatever the merges say
_OF_CLASS = {"GPT2": "gpt-2", "Qwen2": "qwen2"}  # for vocab.json with merges.txt


class Special(NamedTuple):
    """Ids with a meaning of their own.

    Attributes:
      eos: each ends a text; the first is the one to write.
      bos: begins a text; None where there is none.
      pad: fills a row.
      unk: stands for what is not in the vocabulary; -1 where all is.
      hidden: ids that decoding skips.
      prefix: ids that every prompt begins with, for most models BOS or nothing.
    """

    eos: tuple[int, ...]
    bos: int | None
    pad: int
    unk: int
    hidden: frozenset[int]
    prefix: tuple[int, ...]


class Template(NamedTuple):
    """A chat template, and the file it is from."""

    text: str
    where: str


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer(Base):
    """The vocabulary of a decoder-only model.

    Its fingerprint is made of the pieces alone: a draft may end a text by another token than its
    target and still mean the same by every id.

    Attributes:
      backend: encodes; adds nothing of its own.
      names: the pieces by id.
      contents: the bytes that each piece stands for.
      special: ids with a meaning of their own.
      strips: whether a text loses its first space, which encoding has put there.
      template: how messages become one text, if there is a way.
      where: the file or folder.
    """

    backend: library.Tokenizer
    names: tuple[str, ...]
    contents: tuple[bytes, ...]
    special: Special
    strips: bool
    template: Template | None
    where: str

    @property
    def pad_id(self) -> int:
        """Fills a row; EOS where the files name nothing else."""
        return self.special.pad

    @property
    def eos_id(self) -> int:
        """Ends a text: the first of ``special.eos``."""
        return self.special.eos[0]

    @property
    def unk_id(self) -> int:
        """What is not in the vocabulary; -1 where everything is."""
        return self.special.unk

    @property
    def size(self) -> int:
        """Number of pieces; a model's embedding may have more rows."""
        return len(self.names)

    def pieces(self) -> tuple[str, ...]:
        """All pieces by id."""
        return self.names

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for two vocabularies with the same pieces."""
        return hashlib.sha256(json.dumps(self.names).encode()).hexdigest()

    def encode(self, text: str, *, prefix: bool = True) -> list[int]:
        """Ids of a text, without EOS. Special tokens that stand in the text become their ids.

        Args:
          text: The text.
          prefix: Whether it begins with BOS where the tokenizer says so.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*self.special.prefix, *ids] if prefix else ids

    def inputs(self, text: str) -> list[int]:
        """Ids of a text as a decoder-only model reads it: a prompt, without EOS."""
        return self.encode(text)

    def decode(
        self,
        ids: Sequence[int] | np.ndarray,
        *,
        skip_special_tokens: bool = True,
        to_eos: bool = True,
    ) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD, ids without a piece nothing.

        Args:
          ids: The ids.
          skip_special_tokens: Whether to leave out special tokens.
          to_eos: Whether to stop at the first EOS (but for one that is the BOS, in first place).
        """
        stream = Stream(self, skip_special_tokens=skip_special_tokens, to_eos=to_eos)
        return stream.push(ids) + stream.end()

    def stream(self) -> Stream:
        """As `decode`, piece by piece; each id is decoded once."""
        return Stream(self)

    def prompts(
        self, texts: Sequence[str | Sequence[int]], length: int, *, truncate: bool = False
    ) -> tuple[Int32[np.ndarray, "B L"], Int32[np.ndarray, " B"]]:
        """Rows to be continued: no EOS, padding on the right.

        Args:
          texts: B texts, or ids as `chat` gives them.
          length: Row length L.
          truncate: Whether to cut over-long ones; their end stays, and the prefix (BOS).

        Returns:
          Ids [B, L] and lengths [B].

        Raises:
          ValueError: A text does not fit and `truncate` is off, or it has no ids at all: a model
            needs one to begin with.
        """
        rows = [self.encode(text) if isinstance(text, str) else list(text) for text in texts]
        if truncate:
            rows = [self.shorten(np.asarray(row, np.int32), length).tolist() for row in rows]
        problems = [
            f"prompt {i} has {len(row)} ids, "
            + (f"the limit is {length}" if row else "one at least")
            for i, row in enumerate(rows)
            if not 0 < len(row) <= length
        ]
        if problems:
            raise ValueError("; ".join(problems))
        ids = np.full((len(rows), length), self.pad_id, np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return ids, np.array([len(row) for row in rows], np.int32)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """Messages as one text, by the model's chat template.

        Args:
          messages: Each with ``role`` (system, user, assistant) and ``content``.
          add_generation_prompt: Whether it ends where the assistant's answer begins.
          **more: Further variables of the template, e.g. ``tools``.

        Returns:
          The text, with its special tokens.

        Raises:
          ValueError: There is no template, or it fails; the file is named.
        """
        if self.template is None:
            raise ValueError(f"{self.where} has no chat template")
        s = self.special
        ids = {"bos": s.bos, "eos": self.eos_id, "pad": s.pad, "unk": s.unk}
        tokens = {f"{k}_token": self.names[i] for k, i in ids.items() if i is not None and i >= 0}
        context = {"tools": None, "documents": None, **tokens, **more}
        context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return _compile(self.template.text).render(context)
        except Exception as error:  # whatever a stranger's program may raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{self.template.where}: the chat template fails: {reason}") from None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> list[int]:
        """Ids of messages; BOS stands there only if the template writes it. See `render`."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **more)
        return self.encode(text, prefix=False)

    def shorten(self, ids: np.ndarray, length: int) -> np.ndarray:
        """The end of a prompt, which is what it goes on from, behind the prefix (BOS)."""
        if len(ids) <= length:
            return ids
        prefix = zip(ids.tolist(), self.special.prefix, strict=False)
        first = sum(i == j for i, j in itertools.islice(prefix, length))
        return np.append(ids[:first], ids[len(ids) - (length - first) :])


class Stream:
    """Turns ids that come one after the other into text that comes piece by piece.

    Characters whose bytes are spread over several ids are held back until they are whole. All that
    is returned, put together, is what `Tokenizer.decode` makes of all the ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, to_eos: bool = True
    ):
        """Begins a text; see `Tokenizer.decode`."""
        self._contents = tokenizer.contents
        self._bos = tokenizer.special.bos
        self._eos = frozenset(tokenizer.special.eos if to_eos else ())
        self._hidden = tokenizer.special.hidden if skip_special_tokens else frozenset()
        self._strip = tokenizer.strips
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first, self.ended = True, False

    def push(self, ids: Iterable[int] | np.ndarray) -> str:
        """Takes the next ids, and gives what text they complete; nothing behind EOS."""
        return "".join(self._one(int(token)) for token in ids)

    def end(self) -> str:
        """Gives what was held back: U+FFFD for a character that stayed incomplete."""
        return self._utf8.decode(b"", final=True)

    def _one(self, token: int) -> str:
        first, self._first = self._first, False
        if token in self._eos and not (first and token == self._bos):
            self.ended = True
        if self.ended or token in self._hidden or not 0 <= token < len(self._contents):
            return ""
        content = self._contents[token]
        if content and self._strip:
            self._strip, content = False, content.removeprefix(b" ")
        return self._utf8.decode(content)


def load(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a Hugging Face folder or its ``tokenizer.json``.

    Raises:
      ValueError: see `of_gguf` and `of_folder`.
    """
    place = pathlib.Path(path).expanduser()
    if place.name == "tokenizer.json":
        return of_folder(place.parent)
    return of_gguf(place) if place.is_file() else of_folder(place)


def of_gguf(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer in a GGUF file.

    Args:
      path: The file, with a vocabulary of kind ``gpt2`` or ``llama``.

    Returns:
      The tokenizer; rows of the embedding without a piece are left out.

    Raises:
      ValueError: No GGUF file, no vocabulary in it, or one of another kind.
    """
    words = gguf.vocabulary(path)
    where = str(path)
    template = None if words.chat_template is None else Template(words.chat_template, where)
    return _build(words, template, where)


def of_folder(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer in a Hugging Face folder.

    It is read from ``tokenizer.json``, or else from ``tokenizer.model`` (SentencePiece), or else
    from ``vocab.json`` and ``merges.txt``. Special tokens are those of ``tokenizer_config.json`` and
    ``special_tokens_map.json``; any ``eos_token_id`` in ``generation_config.json`` ends a text too.

    Args:
      path: The folder.

    Returns:
      The tokenizer.

    Raises:
      ValueError: There is none, it is of another kind, or nothing says which token ends a text.
    """
    folder = pathlib.Path(path).expanduser()
    if (folder / "tokenizer.json").is_file():
        return _of_json(folder)
    if (folder / "tokenizer.model").is_file():
        words = _of_model(folder)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        words = _of_merges(folder)
    else:
        raise ValueError(
            f"no tokenizer.json, no tokenizer.model and no vocab.json with merges.txt in {folder}"
        )
    return _build(words, _template(folder), str(folder))


# From pieces, types, scores and merges.


def _build(words: gguf.Vocabulary, template: Template | None, where: str) -> Tokenizer:
    words = _without_padding(words)
    if not words.eos_ids:
        raise ValueError(f"{where} does not say which token ends a text")
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    if words.model not in kinds:
        raise ValueError(f"{where} has a {words.model!r} tokenizer, which is none of {list(kinds)}")
    try:
        backend, content = kinds[words.model](words)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{where} has a vocabulary that cannot be used: {error}") from None
    eos, bos = words.eos_ids, words.bos_id
    # Some files call the ends of a text user-defined, or even normal pieces.
    hidden = {i for i, kind in enumerate(words.types) if kind in (_UNKNOWN, _CONTROL)}
    hidden |= {*eos} if bos is None else {bos, *eos}
    added = hidden | {i for i, kind in enumerate(words.types) if kind == _USER_DEFINED}
    _add(backend, {words.pieces[i]: i in hidden for i in sorted(added)})
    contents = (
        piece.encode() if i in added else content(piece) for i, piece in enumerate(words.pieces)
    )
    special = Special(
        eos=eos,
        bos=bos,
        pad=eos[0] if words.pad_id is None else words.pad_id,
        unk=-1 if words.unk_id is None else words.unk_id,
        hidden=frozenset(hidden),
        prefix=(bos,) if words.add_bos and bos is not None else (),
    )
    strips = words.model == "llama" and words.add_space_prefix
    return Tokenizer(backend, words.pieces, tuple(contents), special, strips, template, where)


def _without_padding(words: gguf.Vocabulary) -> gguf.Vocabulary:
    """Without the last pieces that only name rows of the embedding: ``[PAD32000]`` and so on."""
    size = len(words.pieces)
    while size and words.types[size - 1] != _NORMAL and words.pieces[size - 1] == _hole(size - 1):
        size -= 1
    return words._replace(pieces=words.pieces[:size], types=words.types[:size])


def _hole(i: int) -> str:
    """llama.cpp's name of a row without a piece."""
    return f"[PAD{i}]"


def _add(backend: library.Tokenizer, names: Mapping[str, bool]) -> None:
    """Has pieces found whole in a text before anything else is done; True for special ones."""
    tokens = [
        library.AddedToken(name, special=special, normalized=False)
        for name, special in names.items()
    ]
    backend.add_tokens(tokens)


def _byte_level(words: gguf.Vocabulary) -> tuple[library.Tokenizer, _Content]:
    """Backend of a GPT-2-like vocabulary, and what a piece's bytes are."""
    pre = _ALIASES.get(words.pre, words.pre)
    if pre not in _CUTS:
        raise ValueError(f"pre-tokenizer {words.pre!r} is none of {[*_CUTS, *_ALIASES]}")
    ids = {piece: i for i, piece in enumerate(words.pieces)}
    whole = pre in _WHOLE_WORDS
    backend = library.Tokenizer(models.BPE(ids, list(words.merges), ignore_merges=whole))
    cuts = [pre_tokenizers.Split(library.Regex(cut), "isolated") for cut in _CUTS[pre]]
    into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, into_bytes])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend, _bytes_of_letters


def _sentencepiece(words: gguf.Vocabulary) -> tuple[library.Tokenizer, _Content]:
    """Backend of a SentencePiece BPE vocabulary, and what a piece's bytes are."""
    ids = {piece: i for i, piece in enumerate(words.pieces)}
    unknown = None if words.unk_id is None else words.pieces[words.unk_id]
    model = models.BPE(
        ids, _merges(words, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = library.Tokenizer(model)
    prefix = [normalizers.Prepend(_SPACE)] if words.add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    return backend, _bytes_of_words


def _merges(words: gguf.Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges whatever gives the piece with the best score: all pairs, best first."""
    scored = []
    for piece, score in zip(words.pieces, words.scores, strict=False):
        pairs = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        scored += [(score, (a, b)) for a, b in pairs if a in ids and b in ids]
    scored.sort(key=lambda item: -item[0])
    return [pair for _, pair in scored]


@functools.cache
def _letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself if it can be seen, or else the next from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    seen += range(ord("®"), ord("ÿ") + 1)
    rest = [byte for byte in range(256) if byte not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(rest)}


def _bytes_of_letters(piece: str) -> bytes:
    letters = _letters()
    if not all(letter in letters for letter in piece):
        return piece.encode()
    return bytes(letters[letter] for letter in piece)


def _bytes_of_words(piece: str) -> bytes:
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE, " ").encode()


# From a folder.


def _of_json(folder: pathlib.Path) -> Tokenizer:
    """The tokenizer in ``tokenizer.json``, whose own rules stay as they are."""
    file = folder / "tokenizer.json"
    try:
        backend = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{file} is no tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    content, strips = _content(json.loads(backend.to_str()).get("decoder"), file)
    known = backend.get_added_tokens_decoder()
    named = {kind: backend.token_to_id(name) for kind, name in _named(folder).items()}
    ids = {kind: i for kind, i in named.items() if i is not None}
    _add(backend, {backend.id_to_token(i): True for i in ids.values() if i not in known})
    added = backend.get_added_tokens_decoder()
    names = _by_id(backend.get_vocab(with_added_tokens=True))
    contents = (name.encode() if i in added else content(name) for i, name in enumerate(names))
    eos = _ends(folder, ids.get("eos"), len(names))
    if not eos:
        raise ValueError(f"{folder} does not say which token ends a text")
    marked = {i for i, token in added.items() if token.special}
    special = Special(
        eos=eos,
        bos=ids.get("bos"),
        pad=ids.get("pad", eos[0]),
        unk=ids.get("unk", -1),
        hidden=frozenset(marked | {*ids.values(), *eos}),
        prefix=_prefix(backend),
    )
    return Tokenizer(
        backend, names, tuple(contents), special, strips, _template(folder), str(folder)
    )


def _content(decoder: Mapping[str, Any] | None, file: pathlib.Path) -> tuple[_Content, bool]:
    """What the bytes of a piece are, and whether a text loses its first space, by the decoder."""
    parts = {} if decoder is None else {p["type"]: p for p in decoder.get("decoders", [decoder])}
    if "ByteLevel" in parts:
        return _bytes_of_letters, False
    if "Metaspace" in parts:
        return _bytes_of_words, parts["Metaspace"].get("prepend_scheme") != "never"
    if "ByteFallback" in parts:
        return _bytes_of_words, "Strip" in parts
    kind = None if decoder is None else decoder["type"]
    raise ValueError(f"{file} decodes by {kind}, neither by ByteLevel nor by ByteFallback")


def _prefix(backend: library.Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before a text."""
    found = backend.encode("a")
    count = sum(itertools.takewhile(bool, found.special_tokens_mask))
    return tuple(found.ids[:count])


def _of_model(folder: pathlib.Path) -> gguf.Vocabulary:
    """The vocabulary in ``tokenizer.model``, with what the other files add."""
    file = folder / "tokenizer.model"
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{file} is no SentencePiece model: {error}") from None
    config = entries(folder / "tokenizer_config.json")
    kinds = {
        _UNKNOWN: model.is_unknown,
        _CONTROL: model.is_control,
        _UNUSED: model.is_unused,
        _BYTES: model.is_byte,
    }
    ids = range(model.get_piece_size())
    words = gguf.Vocabulary(
        model="llama",
        pre="default",
        pieces=tuple(model.id_to_piece(i) for i in ids),
        types=tuple(next((kind for kind, test in kinds.items() if test(i)), _NORMAL) for i in ids),
        scores=tuple(model.get_score(i) for i in ids),
        merges=(),
        bos_id=model.bos_id() if model.bos_id() >= 0 else None,
        eos_ids=(model.eos_id(),) if model.eos_id() >= 0 else (),
        pad_id=None,
        unk_id=model.unk_id(),
        add_bos=bool(config.get("add_bos_token", True)),
        add_space_prefix=config.get("add_prefix_space") is not False,
        chat_template=None,
    )
    return _completed(folder, words)


def _of_merges(folder: pathlib.Path) -> gguf.Vocabulary:
    """The vocabulary in ``vocab.json`` and ``merges.txt``, with what the other files add."""
    config = entries(folder / "tokenizer_config.json")
    kind = str(config.get("tokenizer_class", "GPT2Tokenizer"))
    pre = next((pre for name, pre in _OF_CLASS.items() if kind.startswith(name)), None)
    if pre is None:
        raise ValueError(f"{folder} has no tokenizer.json, and {kind} cannot be made without")
    pieces = _by_id(entries(folder / "vocab.json"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    if bad := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"{folder / 'merges.txt'}: {' '.join(bad[0])!r} is no pair of pieces")
    words = gguf.Vocabulary(
        model="gpt2",
        pre=pre,
        pieces=pieces,
        types=(_NORMAL,) * len(pieces),
        scores=(),
        merges=tuple(merges),
        bos_id=None,
        eos_ids=(),
        pad_id=None,
        unk_id=None,
        add_bos=bool(config.get("add_bos_token", False)),
        add_space_prefix=False,
        chat_template=None,
    )
    return _completed(folder, words)


def _completed(folder: pathlib.Path, words: gguf.Vocabulary) -> gguf.Vocabulary:
    """With the added and special tokens that the other files name."""
    more = entries(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    extra = {int(i): str(name) for name, i in entries(folder / "added_tokens.json").items()}
    extra |= {int(i): token["content"] for i, token in more.items()}
    plain = {int(i) for i, token in more.items() if not token.get("special")}
    last = len(words.pieces)
    pieces = [*words.pieces, *(_hole(i) for i in range(last, max(extra, default=-1) + 1))]
    types = [*words.types, *[_UNUSED] * (len(pieces) - last)]
    for i, name in extra.items():
        pieces[i], types[i] = name, _USER_DEFINED if i in plain else _CONTROL
    ids = {piece: i for i, piece in enumerate(pieces)}
    found = {kind: ids[name] for kind, name in _named(folder).items() if name in ids}
    for i in found.values():
        types[i] = _CONTROL
    eos = found.get("eos", words.eos_ids[0] if words.eos_ids else None)
    return words._replace(
        pieces=tuple(pieces),
        types=tuple(types),
        bos_id=found.get("bos", words.bos_id),
        eos_ids=_ends(folder, eos, len(pieces)),
        pad_id=found.get("pad"),
        unk_id=found.get("unk", words.unk_id),
    )


def _by_id(ids: Mapping[str, int]) -> tuple[str, ...]:
    """Pieces by id; ids that are left out are named as llama.cpp does."""
    names = [_hole(i) for i in range(max(ids.values()) + 1)]
    for name, i in ids.items():
        names[i] = name
    return tuple(names)


def _named(folder: pathlib.Path) -> dict[str, str]:
    """Special tokens by kind (bos, eos, pad, unk), as far as the files name them."""
    config = entries(folder / "tokenizer_config.json")
    older = entries(folder / "special_tokens_map.json")
    found = {}
    for kind in ("bos", "eos", "pad", "unk"):
        token = config.get(f"{kind}_token", older.get(f"{kind}_token"))
        token = token.get("content") if isinstance(token, dict) else token
        found |= {kind: token} if isinstance(token, str) else {}
    return found


def _ends(folder: pathlib.Path, first: int | None, size: int) -> tuple[int, ...]:
    """All ids that end a text."""
    ids = [] if first is None else [first]
    for name in ("generation_config", "config"):
        given = entries(folder / f"{name}.json").get("eos_token_id")
        ids += given if isinstance(given, list) else [] if given is None else [given]
    return tuple(i for i in dict.fromkeys(ids) if 0 <= i < size)


def _template(folder: pathlib.Path) -> Template | None:
    """The chat template: a file of its own goes before an entry."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return Template(file.read_text(encoding="utf-8"), str(file))
    file = folder / "tokenizer_config.json"
    found = entries(file).get("chat_template")
    if isinstance(found, list):
        by_name = {entry.get("name"): entry.get("template") for entry in found}
        found = by_name.get("default", next(iter(by_name.values()), None))
    return Template(found, str(file)) if isinstance(found, str) else None


# Chat templates.


@functools.lru_cache(maxsize=8)
def _compile(template: str):
    """A template, with the functions and filters that transformers gives it.

    Templates are programs from strangers: they run in Jinja's sandbox, which hides Python's own
    attributes from them and lets them change nothing that they are given.
    """
    from jinja2 import ext, nodes, sandbox
    from jinja2.exceptions import TemplateError

    class Generation(ext.Extension):
        """``{% generation %}`` marks what the assistant wrote, which matters in training only."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def fail(message: str):
        raise TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    # Jinja's own escapes for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
