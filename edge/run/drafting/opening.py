"""The drafter of a plan: a model of its own, the model's own layer, or its assistant or EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.base import Engine, EngineConfig
from edge.formats.gguf import GGUFFile
from edge.model.model import Model
from edge.model.structure.mtp import mtp_file
from edge.model.structure.spec import ModelSpec
from edge.options import Options
from edge.plan.plan import Plan
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.drafter import Drafter

Load = Callable[[GGUFFile, ModelSpec, EngineConfig], Engine]


def open_drafter(model: Model, plan: Plan, options: Options, meter: EnergyMeter, load: Load) -> Drafter | None:
    """The drafter of a plan; None: it has none. load: loads an engine."""
    if plan.draft is None:
        return None
    if plan.config.mtp:
        from edge.run.drafting.mtp_layer import MTPLayer  # here: few models have one

        file = mtp_file(model.file)
        assert file is not None
        return MTPLayer(file, plan.draft, meter)
    draft = options.draft_file
    assert draft is not None
    if draft.assists:
        from edge.run.drafting.assistant import AssistantDrafter

        return AssistantDrafter(draft, model, plan.draft, meter, 1 + plan.config.drafts)
    engine = load(draft.file, draft.spec, plan.draft)
    if draft.spec.features:
        from edge.run.drafting.eagle_head import EagleHead

        return EagleHead(draft, model, engine, meter)
    from edge.run.drafting.draft_model import DraftModel

    return DraftModel(engine, meter)
