"""A model, with llama.cpp's own tokenizer where edge knows none."""

from __future__ import annotations

from pathlib import Path

from edge.errors import MissingExtraError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.model import Model, make_tokenizer
from edge.model.model import open_model as open_with
from edge.model.tokens.tokenizer import TokenizerLike, check_known


def open_model(model: str | Path) -> Model:
    """Check and open MODEL: a GGUF path, a folder or an installed name.

    Raises InputError, ModelFormatError, UnsupportedError.
    """
    return open_with(model, find_tokenizer)


def find_tokenizer(file: GGUFFile) -> TokenizerLike:
    """The file's tokenizer, llama.cpp's if edge has none for it. Raises ModelFormatError, UnsupportedError."""
    try:
        check_known(file)
    except UnsupportedError as unknown:
        from edge.backends.llamacpp.tokenizer import LlamaCppTokenizer

        try:
            return LlamaCppTokenizer(file)
        except MissingExtraError as error:
            raise UnsupportedError(f"{unknown}; llama.cpp may know it, but {error}") from None
    return make_tokenizer(file)
