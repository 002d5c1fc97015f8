"""edge: language models on small devices, inside a stated budget.

    import edge

    with edge.load("model.gguf", memory="256MiB") as session:
        print(session.generate("Why is the sky blue?"))
        print(session.report.memory.peak_rss)

Names are imported when first used: `import edge` itself takes a few milliseconds.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it for true; importing typing takes ten times as long as the rest
if TYPE_CHECKING:
    from typing import Any

    from edge.apps.bundle import export
    from edge.apps.sections.adapter_file import export_adapter
    from edge.apps.serve import serve_site
    from edge.documents.documents import Documents
    from edge.documents.indexing import index
    from edge.errors import (
        BudgetError,
        BusyError,
        DownloadError,
        EdgeError,
        IncompleteError,
        InputError,
        MissingExtraError,
        ModelFormatError,
        UnsupportedError,
    )  # fmt: skip
    from edge.grammar.grammar import Grammar
    from edge.grammar.matcher import check_grammar
    from edge.lab.inventory import models
    from edge.lab.prediction.fits import fits
    from edge.lab.prediction.forecast import forecast
    from edge.lab.quality.perplexity import perplexity
    from edge.lab.quality.tasks import eval_tasks
    from edge.lab.quality.windows import divergence
    from edge.lab.searching.search import search
    from edge.media.picture import Image
    from edge.media.recording import Sound
    from edge.model.model import Model
    from edge.options import Options
    from edge.plan.plan import Plan, make_plan
    from edge.prompt_cache.cache import PromptCache
    from edge.pulling import pull
    from edge.run.conversation import Conversation
    from edge.run.report import RunReport
    from edge.run.session import Session
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model
    from edge.sampling import SamplingParams

    __version__: str

_HOMES = {
    "BudgetError": "errors", "BusyError": "errors", "Conversation": "run.conversation",
    "Documents": "documents.documents", "DownloadError": "errors",
    "EdgeError": "errors", "Grammar": "grammar.grammar", "Image": "media.picture", "IncompleteError": "errors",
    "InputError": "errors", "MissingExtraError": "errors", "Model": "model.model", "ModelFormatError": "errors",
    "Options": "options", "Plan": "plan.plan", "PromptCache": "prompt_cache.cache", "RunReport": "run.report",
    "SamplingParams": "sampling", "Session": "run.session", "Sound": "media.recording", "UnsupportedError": "errors",
    "check_grammar": "grammar.matcher", "divergence": "lab.quality.windows", "eval_tasks": "lab.quality.tasks",
    "export": "apps.bundle", "export_adapter": "apps.adapter_file", "fits": "lab.prediction.fits",
    "forecast": "lab.prediction.forecast", "index": "documents.indexing",
    "load": "run.starting.loading", "make_plan": "plan.plan",
    "models": "lab.inventory", "open_model": "run.starting.opening", "perplexity": "lab.quality.perplexity",
    "pull": "pulling", "search": "lab.searching.search", "serve_site": "apps.serve",
}  # fmt: skip

__all__ = [
    "BudgetError", "BusyError", "Conversation", "Documents", "DownloadError", "EdgeError", "Grammar", "Image",
    "IncompleteError",
    "InputError", "MissingExtraError", "Model", "ModelFormatError", "Options", "Plan", "PromptCache", "RunReport",
    "SamplingParams", "Session", "Sound", "UnsupportedError", "check_grammar", "divergence", "eval_tasks", "export",
    "export_adapter", "fits", "forecast", "index", "load", "make_plan", "models", "open_model", "perplexity",
    "pull", "search", "serve_site",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("edge.storage.versions").edge_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'edge' has no attribute {name!r}")
    return getattr(import_module(f"edge.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
