"""From a model's name and options to a session: downloads, races engines and plans where that is needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edge.backends.base import Backend, LoadProgress
from edge.devices.child import room_for_children
from edge.devices.memory import memory_use
from edge.devices.power import find_meter
from edge.errors import BudgetError
from edge.formats.gguf import GGUFFile
from edge.grammar.grammar import Grammar
from edge.model.model import Model
from edge.model.names.catalog import find_local
from edge.model.structure.spec import ModelSpec
from edge.options import NO_EYES, Options, takes_options
from edge.plan.engines import Pace, plan_here
from edge.plan.plan import Plan
from edge.run.arguments import check_function, check_meter
from edge.run.budgets.meters import EnergyMeter
from edge.run.history import remember_run
from edge.run.session import Session, open_sessions
from edge.run.starting.opening import open_model
from edge.storage.making import account

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords

_log = logging.getLogger("edge")


@takes_options
def load(
    model: str | Path | Model,
    options: Options | None = None,
    *,
    meter: EnergyMeter | None = None,
    on_load: LoadProgress | None = None,
    grammar: Grammar | None = None,
    **keywords: Unpack[Keywords],
) -> Session:
    """Plan a run that fits, load the model, and return a Session.

    model: a GGUF path, an installed name (`smollm2-135m`), a name on the Hub, which is downloaded if it is not here
    (see `edge.pull`), or an opened Model. meter: counts the joules (default: the device's best sensor, or an estimate).
    on_load: is called with the fraction that is loaded. grammar: of answers to come: it is checked, and the plan counts
    the tables of the model's vocabulary that all grammars need, before they are made. The keywords are options, as
    people write them ("256MiB", "20s", or a number of bytes, seconds, joules, watts, °C); they go before those of
    `options`. time and energy hold for every generation; prompt_cache may be a PromptCache, which sessions share:

    OPTIONS

    Raises BudgetError if nothing fits, UnsupportedError for a temperature that nothing here measures, and the errors of
    `open_model`.
    """
    return open_session(model, Options.of(options, **keywords), meter=meter, on_load=on_load, grammar=grammar)


def open_session(
    model: str | Path | Model, options: Options, *, meter: EnergyMeter | None = None,
    on_load: LoadProgress | None = None, more: int | None = None, grammar: Grammar | None = None,
) -> Session:  # fmt: skip
    """`load`, for a caller that accounts for the process's memory itself. more: bytes that the process will hold
    besides; None: by the plans of its open sessions."""
    check_function("on_load", on_load)
    cache = options.prompt_cache
    if cache is not None:
        from edge.prompt_cache.cache import PromptCache

        if not isinstance(cache, PromptCache):
            options = replace(options, prompt_cache=PromptCache(cache, size=f"{options.prompt_cache_size}B"))
    meter = check_meter(meter or find_meter())
    with room_for_children(options.memory), account(lambda: meter.read().joules) as made:
        opened = (model if isinstance(model, Model) else _open(model, options)).with_template(options.chat_template)
        if not opened.senses and options.mmproj != NO_EYES and not opened.spec.encoder:
            from edge.run.starting.senses import with_senses  # here: few models see

            opened = with_senses(opened, options, meter)
        still_to_come = _still_to_come() if more is None else more
        reserve = sum(each.reserve for each in opened.senses.values())
        if opened.senses:
            from edge.run.starting.senses import options_that_see

            options, still_to_come = options_that_see(options, opened), still_to_come + reserve
        if grammar is not None:
            from edge.grammar.matcher import check_grammar, tables_bytes  # here: few runs need them

            still_to_come += tables_bytes(opened.tokenizer)
        if opened.spec.ears is not None:
            from edge.run.speech.plan import plan_hearing  # here: few models hear
            from edge.run.starting.hearing import HearingSession

            return HearingSession(opened, *plan_hearing(opened.file, options, still_to_come), options, on_load, meter)
        try:
            backend, plan = plan_run(opened.file, opened.spec, options, on_load, more=still_to_come)
        except BudgetError:
            if not opened.senses or options.mmproj is not None:
                raise
            lacks = " and ".join(f"{kind}s" for kind in opened.senses)
            _log.warning("%s takes no %s: its encoder does not fit beside it (a larger --memory)", opened.name, lacks)
            still_to_come -= reserve
            opened = opened.with_senses({})
            backend, plan = plan_run(opened.file, opened.spec, options, on_load, more=still_to_come)
        if grammar is not None:
            check_grammar(grammar, opened)
        opened = opened.with_prefix(options.prefix_file)
        session = Session(opened, backend, plan, options, on_load, meter)
    session.prepared = made
    session.observers.append(partial(remember_run, session.spec))
    return session


def plan_run(
    file: GGUFFile, spec: ModelSpec, options: Options, progress: LoadProgress | None = None, *, more: int = 0
) -> tuple[Backend, Plan]:
    """`plan_here`, with a race of engines if necessary, but not in runs with a budget of seconds or joules."""

    def timed(entries: Sequence[tuple[Backend, Plan]]) -> Sequence[Pace]:
        from edge.run.starting.race import race

        return race(file, spec, entries, progress)

    counted = options.time is not None or options.energy is not None
    return plan_here(file, spec, options, more, None if counted else timed)


def _still_to_come() -> int:
    """Bytes that the process does not hold yet, but will by the plans of its open sessions."""
    planned = max((session.plan.bytes.total for session in open_sessions), default=0)
    return max(0, planned - memory_use().rss)


def _open(model: str | Path, options: Options) -> Model:
    """Open a model; download it first if it is on the Hub and not here."""
    found = find_local(model)
    if found is None:
        from edge.pulling import ensure  # here: local models need no client for HTTP

        found = ensure(model, options)
    return open_model(found)
