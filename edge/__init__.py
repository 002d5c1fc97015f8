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
    from edge.exporting.adapter_file import export_adapter
    from edge.exporting.bundle import export
    from edge.exporting.serve import serve_site
    from edge.grammar.grammar import Grammar
    from edge.grammar.matcher import check_grammar
    from edge.inventory import models
    from edge.model.model import Model
    from edge.options import Options
    from edge.plan.plan import Plan, make_plan
    from edge.prediction.fits import fits
    from edge.prediction.forecast import forecast
    from edge.prompt_cache.cache import PromptCache
    from edge.pulling import pull
    from edge.quality.perplexity import perplexity
    from edge.quality.tasks import eval_tasks
    from edge.quality.windows import divergence
    from edge.run.conversation import Conversation
    from edge.run.report import RunReport
    from edge.run.session import Session
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model
    from edge.sampling import SamplingParams
    from edge.searching.search import search

    __version__: str

_HOMES = {
    "BudgetError": "errors", "BusyError": "errors", "Conversation": "run.conversation", "DownloadError": "errors",
    "EdgeError": "errors", "Grammar": "grammar.grammar", "IncompleteError": "errors", "InputError": "errors",
    "MissingExtraError": "errors", "Model": "model.model", "ModelFormatError": "errors", "Options": "options",
    "Plan": "plan.plan", "PromptCache": "prompt_cache.cache", "RunReport": "run.report",
    "SamplingParams": "sampling", "Session": "run.session", "UnsupportedError": "errors",
    "check_grammar": "grammar.matcher", "divergence": "quality.windows", "eval_tasks": "quality.tasks",
    "export": "exporting.bundle", "export_adapter": "exporting.adapter_file", "fits": "prediction.fits",
    "forecast": "prediction.forecast", "load": "run.starting.loading", "make_plan": "plan.plan", "models": "inventory",
    "open_model": "run.starting.opening", "perplexity": "quality.perplexity", "pull": "pulling",
    "search": "searching.search", "serve_site": "exporting.serve",
}  # fmt: skip

__all__ = [
    "BudgetError", "BusyError", "Conversation", "DownloadError", "EdgeError", "Grammar", "IncompleteError",
    "InputError", "MissingExtraError", "Model", "ModelFormatError", "Options", "Plan", "PromptCache", "RunReport",
    "SamplingParams", "Session", "UnsupportedError", "check_grammar", "divergence", "eval_tasks", "export",
    "export_adapter", "fits", "forecast", "load", "make_plan", "models", "open_model", "perplexity", "pull", "search",
    "serve_site",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("edge.storage.versions").edge_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'edge' has no attribute {name!r}")
    return getattr(import_module(f"edge.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
