"""A model file, checked and opened but not loaded: its architecture, its tokenizer, its chat template."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from edge.catalog import find_model
from edge.chat import ChatTemplate, Segment
from edge.errors import InputError, UnsupportedError
from edge.gguf_file import GGUFFile, read_gguf
from edge.model import read_spec
from edge.model_folder import read_folder
from edge.sampling import SamplingParams, choose_sampling
from edge.spec import ModelSpec
from edge.tokenizer import Tokenizer
from edge.types import IntArray


class Model:
    """A model file, checked and opened but not loaded: its architecture, tokenizer and chat template."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.path = file, file.folder or file.path
        self.spec: ModelSpec = read_spec(file)
        self.tokenizer = Tokenizer(file)
        source = file.metadata.get("tokenizer.chat_template")
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        self.template = (
            ChatTemplate(
                source,
                "" if bos is None else self.tokenizer.text(bos),
                "" if eos is None else self.tokenizer.text(eos),
            )
            if isinstance(source, str)
            else None
        )

    def encode_prompt(self, prompt: str | Iterable[str], *, system: str | None = None, raw: bool = False) -> IntArray:
        """Token ids of a first prompt, int32 [n], through the chat template unless `raw` or there is none."""
        if prompt == "":
            raise InputError("the prompt is empty")
        if raw or self.template is None:
            if system is not None:
                raise UnsupportedError("a system prompt needs a chat template, and this prompt goes without one")
            ids = self.tokenizer.encode(prompt, special=True)
        else:
            ids = self._encode_segments(self.template.first_turn(prompt, system))
        ids = self._with_bos(ids)
        if ids.size == 0:
            raise InputError("the prompt is empty")
        return ids

    def system_rows(self, system: str | None = None) -> int:
        """Tokens of a conversation before its first turn's own text: the system prompt (the template's own if there is
        none), and how the template opens a turn. 0 without a template."""
        if self.template is None:
            return 0
        user = "user"
        opening = takewhile(lambda segment: segment.text is not user, self.template.first_turn(user, system))
        return self._with_bos(self._encode_segments(list(opening))).size

    def sampling(self, **chosen: Any) -> SamplingParams:
        """How to draw tokens: fields of SamplingParams as chosen (None: left open), else as the model's file says."""
        return choose_sampling(self.file.metadata, **chosen)

    def encode_follow_up(self, text: str) -> IntArray:
        """Token ids that continue a conversation after the assistant's reply."""
        if self.template is None:
            raise UnsupportedError("this model has no chat template: use edge run --raw")
        return self._encode_segments(self.template.next_turn(text))

    def _with_bos(self, ids: IntArray) -> IntArray:
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and (ids.size == 0 or ids[0] != bos):
            return np.concatenate([np.array([bos], np.int32), ids])
        return ids

    def _encode_segments(self, segments: list[Segment]) -> IntArray:
        parts = [
            self.tokenizer.encode(segment.text, special=segment.trusted, start=index == 0)
            for index, segment in enumerate(segments)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def open_model(model: str | Path) -> Model:
    """Check and open MODEL: a GGUF path, a folder or an installed name.

    Raises InputError, ModelFormatError, UnsupportedError.
    """
    with _uncollected():
        path = find_model(model)
        return Model(read_folder(path) if path.is_dir() else read_gguf(path))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: it would search a vocabulary's hundred thousand objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
