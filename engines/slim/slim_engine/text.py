"""Tokenizer, chat template, and turning token ids back into text piece by piece."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from slim_engine.config import read_object
from slim_engine.errors import CheckpointError, RequestError

_INCOMPLETE = "\ufffd"  # what a decoder shows for half a character


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, every other byte as the next letter from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _letters_of_bytes()


class TextCodec:
    """tokenizer.json of a checkpoint and, where it has one, its chat template."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no narrower type
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
        settings = folder / "tokenizer_config.json"
        self._config: dict[str, Any] = read_object(settings) if settings.is_file() else {}
        self._template = self._load_template(folder)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` adds the tokenizer's own prefix and suffix, if it has any."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of `ids`."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for. A token may hold part of a character, which no text can show."""
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        if added is not None:
            return str(added.content).encode()
        piece = str(self._tokenizer.id_to_token(token) or "")
        if self._byte_level and all(letter in _BYTE_OF for letter in piece):
            return bytes(_BYTE_OF[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # sentencepiece's way to write one byte
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()  # and its way to write a blank

    @cached_property
    def _byte_level(self) -> bool:
        """Whether the vocabulary spells bytes as letters, as GPT-2's does."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        return "ByteLevel" in (decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ())))

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation with the prompt for the assistant's turn. Raises RequestError."""
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions or /generate")
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens()
            )
        except Exception as error:  # a template is a program, and the messages are its input: it may raise anything
            raise RequestError(f"the chat template refused these messages: {error}") from error
        return self.encode(text, special=False)

    def _load_template(self, folder: Path) -> jinja2.Template | None:
        path = folder / "chat_template.jinja"
        source = path.read_text() if path.is_file() else self._config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t["name"] == "default"), None)
        if source is None:
            return None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(source)
        except (jinja2.TemplateSyntaxError, TypeError) as error:
            raise CheckpointError(f"{folder}: the chat template cannot be read: {error}") from error

    def _special_tokens(self) -> dict[str, str]:
        out = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            if value is not None:
                out[name] = value["content"] if isinstance(value, dict) else value
        return out


class Detokenizer:
    """Text of a growing list of tokens, in pieces that add up to the text of the whole."""

    def __init__(self, codec: TextCodec, skip_special: bool = True) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._from = 0  # decoding starts here, one piece back, so that a piece keeps its leading space
        self._shown = 0  # tokens whose text has been given out
        self._tail = ""  # recent text, for stop strings

    def push(self, ids: list[int], last: bool = False) -> str:
        """Adds tokens; returns the new text. Half a character waits for its other half, unless this is the `last` call."""
        self._ids.extend(ids)
        before = self._codec.decode(self._ids[self._from : self._shown], self._skip_special)
        after = self._codec.decode(self._ids[self._from :], self._skip_special)
        if not last and (after.endswith(_INCOMPLETE) or len(after) <= len(before)):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def push_and_find(self, token: int, stops: tuple[str, ...]) -> str | None:
        """Adds one token; returns the stop string that it completes, if any (the one that begins first)."""
        piece = self.push([token])
        keep = max(map(len, stops), default=1) - 1
        text = self._tail + piece
        self._tail = text[-keep:] if keep else ""
        found = [(text.find(s), s) for s in stops if s in text]
        return min(found)[1] if found else None


class TextStream:
    """Text for a client: Detokenizer plus stop strings, which are cut off together with all that follows."""

    def __init__(self, codec: TextCodec, stops: tuple[str, ...], skip_special: bool = True) -> None:
        self._detokenizer = Detokenizer(codec, skip_special)
        self._stops = stops
        self._held = ""
        self._cut = False

    def push(self, ids: list[int], last: bool = False) -> str:
        """New text that can no longer become part of a stop string."""
        if self._cut:
            return ""
        text = self._held + self._detokenizer.push(ids, last)
        starts = [text.find(s) for s in self._stops if s in text]
        if starts:
            self._cut, self._held = True, ""
            return text[: min(starts)]
        hold = 0 if last else max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
