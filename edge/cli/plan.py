"""`edge plan`: predicts memory, speed and energy of a run, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from edge.budget import format_bytes, format_joules
from edge.cli import options as o
from edge.cli.options import parse_numbers
from edge.cli.terminal.show import print_json, printable, table
from edge.options import Options

if TYPE_CHECKING:
    from edge.backends.base import EngineConfig
    from edge.backends.counts import ExpertForecast
    from edge.lab.prediction.looks import Looks
    from edge.lab.prediction.predict import Decode, Guess, Prediction, Sustained
    from edge.lab.prediction.sounds import SoundCost
    from edge.lab.prediction.work import Streaming
    from edge.plan.npu import NpuUse
    from edge.plan.plan import Plan
    from edge.plan.play import PlayUse

_MOST = 1 << 40  # tokens: beyond any run


@o.command
def plan(
    model: o.ModelArgument,
    device: Annotated[
        str, o.flag("--device", help="The device to plan for, by its name in edge devices list (default: this one).")
    ] = "host",
    *,
    options: Annotated[Options, o.without("max_temp", "keep", "prompt_cache", "prompt_cache_size", "chat_template")],
    tokens: Annotated[
        int | None,
        o.flag("--tokens", min=1, max=_MOST, help="Prompt and answer together, if you know (default: no end)."),
    ] = None,
    prompt: Annotated[
        int | None,
        o.flag(
            "--prompt-tokens",
            min=1,
            max=_MOST,
            help="Those of the prompt, to predict by (default: 512, or half of --tokens).",
        ),
    ] = None,
    image: Annotated[
        str | None,
        o.flag("--image", metavar="SIZE|FILE", help="Show what a picture costs, such as 1280x720, or a file."),
    ] = None,
    audio: Annotated[
        str | None,
        o.flag("--audio", metavar="LENGTH|FILE", help="Show what a sound costs, such as 30s, or a file."),
    ] = None,
    at: Annotated[
        str | None, o.flag("--at", help="Rows in the cache to predict decoding at, such as 128,4096.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Show how a model would run within a budget, here or on another device: bytes, settings, speed and joules.

    Of a model on the Hub that is not here, only the header is read.
    """
    from edge.devices.memory.beyond import beyond_a_run
    from edge.devices.profiles import HOST, find_profile
    from edge.model.model import Model
    from edge.model.names.catalog import find_local
    from edge.plan.device import assumed_memory
    from edge.run.starting.opening import find_tokenizer

    with beyond_a_run():
        from edge.lab.prediction.forecast import forecast

    contexts = None if at is None else parse_numbers("--at", at)
    offered = None
    if find_local(model) is None:
        from edge.pulling import offer

        offered = offer(model, options, device=device)
    subject = model if offered is None else Model(offered.header, find_tokenizer)
    found = forecast(subject, options, device=device, prompt=prompt, contexts=contexts, expected_tokens=tokens)
    looks = None
    if image is not None:
        from edge.lab.prediction.looks import predict_looks

        looks = predict_looks(found, options, device, image)
    heard = None
    if audio is not None:
        from edge.lab.prediction.sounds import predict_sound

        heard = predict_sound(found, options, device, audio)
    made, spec, streaming, prediction = found.plan, found.model.spec, found.streaming, found.prediction
    if json:
        where = {"path": str(found.model.path)} if offered is None else {"download": offered.about()}
        predicted = {"model": spec.label, **where, **made.to_dict()}
        streamed = streaming and asdict(streaming)
        compiled, play = found.npu and asdict(found.npu), found.play and asdict(found.play)
        more = {"streaming": streamed, "npu": compiled, "play": play, "prediction": asdict(prediction)}
        more |= {"image": asdict(looks)} if looks else {}
        more |= {"audio": asdict(heard)} if heard else {}
        print_json(predicted | more)
        return
    if offered is not None:
        print(f"not here yet: {offered}\n")
    profile = find_profile(device)
    if profile.name != HOST:
        print(f"planned for {assumed_memory(profile, options)}\n")
    print(_bytes(made, system=profile.system, npu=found.npu is not None))
    own = options.prefix_file
    print(
        f"\n{spec.label} on {made.backend}, {_processor(made, found.npu)}, KV policy {made.kv_policy}"
        + (f" with {made.sinks} sinks" if made.sinks else "")
        + (f"\nprefix {printable(own.name)}: {own.size:,} of the KV rows" if own else "")
        + (f"\nKV rows: {made.config.kv_dtype}, {made.dtype_by}" if made.dtype_by else "")
        + (f"\nrows or weights: {made.rows_by} (estimated)" if made.rows_by else "")
        + (f"\nengine: {made.chosen}" if made.chosen else "")
        + f"\ntuned: {made.tuned}\n"
    )
    if found.play:
        print(_play(found.play))
    if found.npu:
        print(f"for this NPU: {found.npu.contexts}\n")
    if streaming:
        print(_slower(streaming, made, spec.weight_bytes))
        print(_hits(streaming.experts) + "\n" if streaming.experts else "")
    if rows := _rows(prediction, options, encoder=spec.encoder):
        print(table([f"predicted for {prediction.device}", "", "by"], rows, left=3))
    if heard:
        print("\n" + table(*heard.table(), left=1))
        print(_of_encoder(heard))
        for line in heard.lacks(made):
            print(line)
    if looks:
        print("\n" + table(*looks.table(), left=1))
        print(_of_encoder(looks))
        print(f"--image-tokens auto: {looks.auto:,} at most, by {looks.auto_by}")
        if over := [f"{look.tokens:,}" for look in looks.sizes if look.peak > made.limit]:
            print(f"the limit, {format_bytes(made.limit)}, is too low for {' and '.join(over)} tokens")
        print()
    for line in (*prediction.basis, *prediction.unknown):
        print(line)
    if lasting := next((each.sustained for each in prediction.decode if each.sustained), None):
        print(f"{prediction.device} throttles: settings rank by speed and joules {lasting.when}")


def _processor(made: Plan, npu: NpuUse | None) -> str:
    return str(npu.npu) if npu else made.config.adapter or f"{made.config.threads} threads"


_OWN = {
    "web": ("module", "stacks, tokenizer and sampler"),
    "android": ("library", "the engine's code, stacks, tokenizer"),
    "ios": ("library", "the engine's code, stacks, tokenizer"),
}
"""The first row of a plan, on systems without an interpreter."""


def _bytes(made: Plan, *, system: str, npu: bool) -> str:
    count, config, web = made.bytes, made.config, system == "web"
    own = _OWN.get(system, ("interpreter", "this process and the engine's libraries"))
    drafts = "MTP layer" if config.mtp else "model that drafts"
    rows: list[tuple[str, str, int]] = [
        (*own, count.interpreter),
        ("weights", "in the module's memory" if web else "for the NPU" if npu else _weights(made), count.weights),
        ("KV cache", f"{_kept(config)}{_fixed(count.fixed_kv)}, {config.kv_dtype}", count.kv),
        ("scratch", f"prefill chunk of {config.chunk} tokens", count.scratch),
        *([("snapshots", f"of {made.snapshots} ends of turns", count.snapshots)] if made.snapshots else []),
        *([("adapters", f"rank {config.lora_rank}", count.lora)] if count.lora else []),
        *([(drafts, _rows_of_drafter(made.draft), count.draft)] if made.draft else []),
        ("predicted peak", "estimated", made.predicted_peak),
        *([("first run", "with compilers, once", made.first_run)] if made.first_run else []),
        ("limit", made.limit_source, made.limit),
        *([("on the disk", "a table, of which a token reads a row", count.on_disk)] if count.on_disk else []),
        *([("on the GPU", _on_gpu(made), count.gpu)] if count.gpu else []),
        *([("its limit", made.gpu_limit_source, made.gpu_limit)] if made.gpu_limit is not None else []),
    ]
    return table(["what", "how", "bytes", "size"], [[a, b, f"{n:,}", format_bytes(n)] for a, b, n in rows], left=2)


def _rows_of_drafter(config: EngineConfig) -> str:
    return f"with {config.capacity:,} rows" if config.capacity > 1 else "over the model's rows"


def _of_encoder(cost: Looks | SoundCost) -> str:
    """What holds for every row of a table of pictures or sounds."""
    by = f"is estimated\nby {cost.by}, and the first token's with a prompt of the above length"
    time = by if cost.by else "is not known"
    other = f"\nthe cpu engine encodes: {cost.elsewhere}" if cost.elsewhere else ""
    return f"the encoder's {format_bytes(cost.weights)} are in memory while it encodes; its time {time}{other}"


def _play(play: PlayUse) -> str:
    """A table of the memory that Google Play counts, and of what it leaves to the rest of the app."""
    rows = []
    states = {
        "in front": play.foreground,
        "with a perceived service": play.service,
        "in the background": play.background,
    }
    for state, most in states.items():
        left = most - play.counted
        rest = format_bytes(left) if left >= 0 else f"{format_bytes(-left)} too much"
        rows.append([state, format_bytes(play.counted), f"{most / (1 << 30):.2f} GiB", rest])
    heads = [f"Google Play, phones of {play.memory >> 30} GB", "counts", "allows", "for the rest of the app"]
    return (
        table(heads, rows, left=1)
        + f"\nfrom {play.since} on ({play.source});"
        + f"\nit counts anonymous memory and swap (estimated), not the {format_bytes(play.mapped)} that are mapped\n"
    )


def _rows(prediction: Prediction, options: Options, *, encoder: bool) -> list[list[str]]:
    rows = []

    def say(what: str, guess: Guess | None, text: str, *, speed: bool = False) -> None:
        if guess is not None:
            known = f", {guess.known}" if speed and guess.known else ""
            rows.append([what, text.format(guess.value), guess.source + known])

    what = "text" if encoder else "prompt"
    say(f"a {what} of {prediction.prompt:,} tokens", prediction.prefill_tok_s, "{:,.4g} tok/s", speed=True)
    if encoder:
        return rows
    say("its first token", prediction.ttft_s, "after {:.3g} s", speed=True)
    for each in prediction.decode:
        figures: list[tuple[str, Decode | Sustained]] = [(f"a token at {each.context:,} rows", each)]
        figures += [(each.sustained.when, each.sustained)] if each.sustained else []
        for what, at in figures:
            say(what, at.tok_s, "{:,.4g} tok/s", speed=True)
            if at.joules is not None:
                say("", at.joules, f"{format_joules(at.joules.value)} per token")
    say("it draws", prediction.watts, "{:.3g} W")
    if options.power is not None:
        slow = prediction.limited_tok_s is not None and not prediction.limited_tok_s.value
        said = "cannot be: it draws more while it waits" if slow else "{:,.4g} tok/s"
        say(f"paced to {options.power:g} W", prediction.limited_tok_s, said, speed=not slow)
    if options.energy is not None:
        say(f"{format_joules(options.energy)} buy", prediction.energy_tokens, "{:,.0f} tokens after that prompt")
    if options.time is not None:
        say(f"in {options.time:g} s", prediction.time_tokens, "{:,.0f} tokens after that prompt")
    return rows


def _slower(streaming: Streaming, made: Plan, weights: int) -> str:
    text = (
        f"weights: at most {format_bytes(made.bytes.weights)} of {format_bytes(weights)} in memory at a time, "
        f"{format_bytes(streaming.bytes)} read anew\nper token"
    )
    if not streaming.experts:  # of which several tokens choose more
        text += f", and per {made.config.chunk} tokens of a prompt"
    if streaming.cached_s is None or streaming.disk_s is None:
        return text
    cached, disk = f"{1e3 * streaming.cached_s:.1f} ms", f"{1e3 * streaming.disk_s:.0f} ms"
    if streaming.from_disk:
        return (
            f"{text}, which adds {disk} each time:\nthe system has no room to keep their file in memory (measured here)"
        )
    return (
        f"{text}, which adds {cached} each time\nwhile the system keeps their file in its page cache, {disk} if it "
        "does not (both measured here)"
    )


def _hits(experts: ExpertForecast) -> str:
    return (
        f"experts: {experts.slots:,} of {experts.experts:,} in memory, where {experts.hit_rate:.0%} of those that are "
        f"chosen will be\n({experts.source})"
    )


def _weights(made: Plan) -> str:
    if made.maps_weights:
        return "mapped from a file"
    if made.bytes.streamed:
        return "at a time"
    return "in buffers of the GPU" if made.bytes.gpu else "repacked in memory"


def _on_gpu(made: Plan) -> str:
    return "memory of its own, not in the peak" if made.bytes.on_card else "of the above, in main memory"


def _kept(config: EngineConfig) -> str:
    each = f"{config.sequences} × " if config.sequences > 1 else ""
    return f"{each}{config.capacity:,} rows"


def _fixed(nbytes: int) -> str:
    """Rows of sliding windows, or recurrent states."""
    return f" and {format_bytes(nbytes)} of fixed size" if nbytes else ""
