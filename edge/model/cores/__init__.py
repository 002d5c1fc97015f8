"""The cores of blocks, such as attention, with their tensors and the size of their states.

A core reads normalised rows x. Its last matrix, `output`, multiplies the core's result (see `layers.py`).
"""

from __future__ import annotations

from typing import TypeVar

from edge.model.cores.attention import Attention, Latent
from edge.model.cores.feed_forward import Dense, Experts
from edge.model.cores.inputs import Features, NextToken, PerLayerInput
from edge.model.cores.parts import (
    BOUNDS,
    EXACT,
    SLOPE,
    UNROTATED,
    Activation,
    Bits,
    Rope,
    Router,
    RowShape,
    Temperature,
    Tensor,
)
from edge.model.cores.recurrent import LANES, DeltaNet, KimiDelta, Mamba, SelectiveScan, ShortConvolution

__all__ = [
    "BOUNDS",
    "EXACT",
    "LANES",
    "SLOPE",
    "UNROTATED",
    "Activation",
    "Attention",
    "Bits",
    "Core",
    "DeltaNet",
    "Dense",
    "Experts",
    "Features",
    "KimiDelta",
    "Latent",
    "Mamba",
    "NextToken",
    "OneCore",
    "PerLayerInput",
    "Rope",
    "Router",
    "RowShape",
    "SelectiveScan",
    "ShortConvolution",
    "Temperature",
    "Tensor",
]  # fmt: skip

# In JSON, experts have the fields of Dense, too, and features those of the last two.
Core = (
    Attention
    | Experts
    | Dense
    | DeltaNet
    | KimiDelta
    | Mamba
    | SelectiveScan
    | ShortConvolution
    | Features
    | PerLayerInput
    | NextToken
)
OneCore = TypeVar(
    "OneCore",
    Attention,
    Dense,
    Experts,
    DeltaNet,
    KimiDelta,
    Mamba,
    SelectiveScan,
    ShortConvolution,
    PerLayerInput,
    NextToken,
    Features,
)
