"""The header of a file that drafts, which must have the same vocabulary as the model it drafts for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edge.errors import InputError, UnsupportedError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.model.names.catalog import find_model
from edge.model.reader import read_spec
from edge.model.structure.mtp import ASSISTANT, EAGLE
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass

_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class DraftFile:
    """A model file, an assistant's or an EAGLE-3 head's, with its header checked."""

    file: GGUFFile  # of a head: what an engine loads
    spec: ModelSpec
    whole: GGUFFile

    @property
    def assists(self) -> bool:
        """Whether it reads the rows of the model that it drafts for."""
        return self.spec.assists

    def layers_for(self, model: ModelSpec) -> tuple[GGUFFile, ModelSpec]:
        """Of an assistant: its layers as engines run them beside a model."""
        from edge.model.drafters.assistant import layers_of  # here: few models have one

        assert model.network is not None
        return layers_of(self.file, self.spec, model.network)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the model whose inputs it reads."""
        return self.spec.features.layers if self.spec.features else ()


@lru_cache(maxsize=2)
def open_draft(model: str | Path) -> DraftFile:
    """Open MODEL without its tokenizer. Raises what `open_model` raises."""
    file = read_gguf(find_model(model))
    if file.metadata.get("general.architecture") == ASSISTANT:
        from edge.model.drafters.assistant import read_assistant  # here: few models have one

        return DraftFile(file, read_assistant(file), file)
    if file.metadata.get("general.architecture") == EAGLE:
        from edge.model.drafters.eagle import plain_file, read_eagle

        return DraftFile(plain_file(file), read_eagle(file), file)
    spec = read_spec(file)
    if spec.ears or spec.encoder:
        raise UnsupportedError(f"--draft {spec.name}: it continues no text: choose a small model with the same tokens")
    return DraftFile(file, spec, file)


def check_draft(draft: DraftFile, file: GGUFFile, spec: ModelSpec) -> None:
    """Raise InputError unless the file drafts for a model: their vocabularies are the same and, for an assistant or a
    head, the shapes of the rows or states that it reads."""
    if not _same_tokens(draft.file, file):
        raise InputError(f"--draft {draft.spec.name}: its tokens are not those of {spec.name}: choose another model")
    if draft.assists:
        from edge.model.drafters.assistant import check_assistant

        check_assistant(draft.file, draft.spec, spec)
    if draft.spec.features:
        from edge.model.drafters.eagle import check_eagle

        check_eagle(draft.whole, draft.spec, spec)


def _same_tokens(one: GGUFFile, other: GGUFFile) -> bool:
    """Whether the bytes of both token lists are equal."""
    return one.spans.keys() & other.spans.keys() >= {_TOKENS} and one.field_bytes(_TOKENS) == other.field_bytes(_TOKENS)
