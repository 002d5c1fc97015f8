"""The interfaces of engines whose states draft tokens: layers for multi-token prediction, EAGLE-3 heads, assistants."""

from __future__ import annotations

from typing import Protocol

from edge.backends.base import Engine, EngineConfig, HiddenEngine, LoadProgress, TopEngine
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.types import FloatArray


class MTPEngine(TopEngine, Protocol):
    """An engine that runs a layer for multi-token prediction as a model of its own (`ModelSpec.mtp`), or a head of
    `edge.model.drafters.eagle`. Its states approximate those of the main model, so it can draft further tokens from
    them."""

    def states(self, count: int) -> FloatArray:
        """The states of the newest pass's last tokens after the last layer, float32 [at most `count`, hidden];
        normalised, but for a head."""
        ...

    def give(self, states: FloatArray, embeddings: FloatArray | None = None) -> None:
        """Supply the main model's states for the next `forward`, float32 [n, hidden], at most a chunk: for each of its
        tokens, the state of the token before. `NextToken` joins them with the tokens' embeddings. A head takes the
        model's features, [n, `Features.size`], or its own states, and the tokens' `embeddings`, [n, hidden], in place
        of the tokens."""
        ...


class StatesEngine(HiddenEngine, Protocol):
    """An engine that returns the states of each pass, and loads the layer that drafts from them."""

    def states(self, count: int) -> FloatArray:
        """As `MTPEngine.states`."""
        ...

    def layer_states(self, count: int) -> FloatArray:
        """The inputs of the layers `EngineConfig.taps`, side by side, for the newest pass's last tokens, float32 [at
        most `count`, layers · hidden]."""
        ...

    def open_mtp(self, file: GGUFFile, config: EngineConfig, progress: LoadProgress | None = None) -> MTPEngine:
        """Load `ModelSpec.mtp`, which shares this engine's embedding and head. file: the result of `mtp_file` for the
        model's file. Raises the errors of `Backend.load`."""
        ...


class AssistingLayers(Protocol):
    """The layers of an assistant beside an engine whose rows they read."""

    def run(self, x: FloatArray) -> FloatArray | None:
        """The normalised state after the last layer, [hidden], from the hidden states before the first, x. It sees what
        the engine's next token sees. None if heads keep different rows."""
        ...

    def close(self) -> None: ...


class SharingEngine(Engine, Protocol):
    """An engine that returns the states of each pass, and runs the layers of a drafter over the rows of its cache."""

    def open_assistant(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> AssistingLayers:
        """Load the layers of `edge.model.drafters.assistant.layers_of`. Raises the errors of `Backend.load`."""
        ...

    def states(self, count: int) -> FloatArray:
        """As `MTPEngine.states`."""
        ...
