"""Text to token ids and back: the folder's tokenizer, its chat template and its end tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moerl.data.rows import Row
from moerl.data.templating import PromptTemplate
from moerl.errors import DataError

_PLACE = "moerl-was-here-5d1c"
"""Stands for what the policy sampled, where a chat template is asked what follows it."""


class ChatTokenizer:
    """The tokenizer of a Hugging Face folder. Only local files are read and no code of the folder is run."""

    def __init__(self, folder: str | Path) -> None:
        """Load `folder`.

        Raises:
            DataError: no such folder, or no tokenizer that transformers can load without running the folder's code.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(
                f"{self.folder}: no such model folder; model.path must be a Hugging Face folder on this machine"
            )
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"{self.folder}: no tokenizer that can be loaded ({reason}); it needs tokenizer.json"
            ) from error
        self.stop_token_ids = self._stop_ids()
        """End tokens: those of generation_config.json, and the tokenizer's."""
        if not self.stop_token_ids:
            raise DataError(f"{self.folder}: neither the tokenizer nor generation_config.json names an end token")
        eos = self._tokenizer.eos_token_id
        self.eos_token_id: int = self.stop_token_ids[0] if eos is None else int(eos)
        pad = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.eos_token_id if pad is None else int(pad)
        added = [token for token in self._tokenizer.get_added_vocab() if len(token) > 1]
        self._added = sorted(added, key=lambda token: (-len(token), token))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder brings a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode_prompt(self, row: Row, template: PromptTemplate) -> np.ndarray:
        """Token ids [s] int32 of the prompt in `template`, up to where the answer starts.

        Raises:
            DataError: the row does not fit the template, or the tokenizer has no tokens for its text.
        """
        prompt = template.render(row, self)
        ids = self._encode(prompt.text, row.source, add_special_tokens=prompt.add_special_tokens)
        while prompt.add_special_tokens and ids and ids[-1] == self.eos_token_id:
            ids.pop()  # some tokenizers close every text; the answer is still to come
        if not ids:
            raise DataError(f"{row.source}: the prompt has no tokens")
        return np.asarray(ids, dtype=np.int32)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], source: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Messages in the folder's chat template, with the generation prompt; `tools` are JSON schemas of functions.

        Raises:
            DataError: the folder has no chat template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise DataError(f"{source}: needs a chat template and {self.folder} has none; use data.template=none")
        from jinja2 import TemplateError

        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except TemplateError as error:
            raise DataError(f"{source}: the chat template refuses the messages ({error})") from error
        unsaid = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
        if unsaid:
            raise DataError(
                f"{source}: the chat template of {self.folder} does not announce the tools {', '.join(unsaid)}; set "
                "rollout.environment.announce=false and describe them in the prompt, or take another model"
            )
        return text

    def after_calls(self, results: Sequence[str]) -> str:
        """What the chat template writes after an assistant's content that tools answered with `results`, up to where
        the assistant speaks again.

        Raises:
            DataError: the folder has no chat template, or one that refuses or leaves out messages of the role `tool`.
        """
        where = "rollout.environment"
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACE}]
        messages += [{"role": "tool", "content": result} for result in results]
        _, place, rest = self.apply_chat_template(messages, where).partition(_PLACE)
        written = [(result.strip(), json.dumps(result, ensure_ascii=False)[1:-1]) for result in results]
        if not place or not all(plain in rest or quoted in rest for plain, quoted in written) or rest == results[0]:
            raise DataError(
                f"{where}: the chat template of {self.folder} does not write what a tool answers as a turn of its own; "
                "set results=text with result_open and result_close, or take a model whose template does"
            )
        return rest

    def encode_text(self, text: str) -> np.ndarray:
        """Token ids [s] int32 of `text` and nothing else; what reads like an added token is that token.

        Raises:
            DataError: the tokenizer has no tokens for it.
        """
        return np.asarray(self._encode(text, "text between turns", add_special_tokens=False), dtype=np.int32)

    def without_added_tokens(self, text: str) -> str:
        """`text` with a space inside whatever the tokenizer would read as an added token, such as the end of a turn."""
        for token in self._added:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def can_write(self, text: str) -> bool:
        """Whether there are tokens for `text` that read as it, white space around it aside."""
        try:
            ids = self._encode(text, "a marker", add_special_tokens=False)
        except DataError:
            return False
        return self.decode(ids, skip_stop=False).strip() == text.strip()

    def encode_completion(self, text: str) -> np.ndarray:
        """Token ids [s] int32 of `text`, with the end token after it (once)."""
        ids = self._encode(text, "a completion", add_special_tokens=False)
        if not ids or ids[-1] != self.eos_token_id:
            ids.append(self.eos_token_id)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_stop: bool = True) -> str:
        """Text of `ids` [s], special tokens visible; `skip_stop` leaves out end tokens at the end."""
        numbers = [int(i) for i in ids]
        while skip_stop and numbers and numbers[-1] in self.stop_token_ids:
            numbers.pop()
        return self._tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_text(self, token: int) -> str:
        """How one token is written, for people."""
        return str(self._tokenizer.convert_ids_to_tokens(int(token)))

    def _encode(self, text: str, source: str, **options: Any) -> list[int]:
        try:
            return self._tokenizer.encode(text, **options)
        except Exception as error:
            if type(error) is not Exception:  # the tokenizers library has no class of its own for text without a token
                raise
            raise DataError(
                f"{source}: the tokenizer of {self.folder} cannot encode {text[:60]!r} ({error})"
            ) from error

    def _stop_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        path = self.folder / "generation_config.json"
        if path.is_file():
            try:
                eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise DataError(f"{path}: is not a JSON object ({error})") from error
            found += eos if isinstance(eos, list) else [eos]
        found.append(self._tokenizer.eos_token_id)
        return tuple(dict.fromkeys(int(i) for i in found if i is not None))
