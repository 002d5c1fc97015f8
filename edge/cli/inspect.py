"""`edge inspect`: the contents of a model file."""

from __future__ import annotations

from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.show import print_json, printable, progress, table

if TYPE_CHECKING:
    from edge.lab.inspection import AdapterInfo, DrafterInfo, EarsInfo, EyesInfo, Inspection, Vocabulary
    from edge.model.structure.spec import ModelSpec

_LONGEST_REASON = 60  # characters in the table of engines
WINDOW = 30  # s, of a model that hears
_LINES, _WIDTH = 3, 100  # of a chat template, unless all of it is requested


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model, or a Hugging Face folder as edge convert would write it.")
    ],
    tensors: Annotated[bool, o.flag("--tensors", help="List all tensors.")] = False,
    template: Annotated[bool, o.flag("--template", help="Print the whole chat template.")] = False,
    hash: Annotated[bool, o.flag("--hash", help="SHA-256 of the file, which is read whole for it.")] = False,
    device: Annotated[
        str | None, o.flag("--device", help="Whether the NPU of this device, of edge devices list, runs it, too.")
    ] = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Show a model's architecture, weights, tokenizer and template, and which engines run it."""
    from edge.lab.inspection import inspect_model

    with progress(enabled=not quiet) as shown:
        bar = shown.step("hashing")
        found = inspect_model(model, device=device, sha256=hash, progress=lambda part: bar(part, 1.0))
    if json:
        print_json(_record(found, tensors=tensors))
        return
    print(table(["model", printable(str(found.path))], _about(found), left=2))
    types = [
        [each.type, f"{each.tensors:,}", f"{each.parameters:,}", format_bytes(each.bytes), f"{100 * each.share:.1f} %"]
        for each in found.types
    ]
    print("\n" + table(["type", "tensors", "parameters", "size", "share"], types))
    if tensors:
        lines = [
            [each.name, "×".join(map(str, each.shape)), each.type, format_bytes(each.nbytes)] for each in found.tensors
        ]
        print("\n" + table(["tensor", "shape", "type", "size"], lines, left=3))
    if found.engines:
        when = "once converted" if found.format.startswith("Hugging") else "runs it"
        headings = ["engine", when, "KV bytes per token (counted)"]
        # A table without a terminal is as wide as its longest cell: long reasons stand below it.
        below = [each for each in found.engines if len(each.reason or "") > _LONGEST_REASON]
        runs = [
            [each.engine, "no: see below" if each in below else each.reason or "yes", _by_dtype(each.kv_bytes)]
            for each in found.engines
        ]
        if any(each.window_bytes for each in found.engines):
            headings.append("of fixed size")
            runs = [[*run, _by_dtype(each.window_bytes)] for run, each in zip(runs, found.engines, strict=True)]
        print("\n" + table(headings, runs, left=4))
        for each in below:
            print(f"{each.engine}: {each.reason}")
    if found.npu is not None:
        npu = str(found.npu.npu) if found.npu.npu else "none"
        noted = [["", found.npu.npu.note]] if found.npu.npu and found.npu.npu.note else []
        print("\n" + table([f"NPU of {found.npu.device}", npu], [["runs it", str(found.npu)], *noted], left=2))
    if found.template is not None:
        text = printable(found.template)
        thinks = ", of a model that thinks (--think)" if found.thinks else ""
        print(f"\nchat template, {len(found.template):,} characters{thinks}:\n{text if template else _beginning(text)}")
    elif found.spec is not None and found.spec.ears:
        print("\na model that hears: edge transcribe writes what was said")
    elif found.spec is not None and found.spec.encoder:
        ranks = found.spec.network is not None and found.spec.network.ranks
        what = "a reranker: edge rank sorts texts with it" if ranks else "an encoder: edge embed makes vectors with it"
        print(f"\n{what}")
    elif found.adapter is None and found.drafter is None and not (found.eyes or found.ears):
        print("\nno chat template: a base model, which continues texts; edge chat cannot run it")


def _by_dtype(sizes: dict[str, int]) -> str:
    return ", ".join(f"{dtype} {size:,}" for dtype, size in sizes.items())


def _line(text: str) -> str:
    """The text of a cell."""
    return " ".join(printable(text).split())[:_WIDTH]


def _beginning(text: str) -> str:
    lines = text.splitlines()
    shown = [line[:_WIDTH] + (" …" if len(line) > _WIDTH else "") for line in lines[:_LINES]]
    return "\n".join([*shown, "… (--template shows all)"] if len(lines) > _LINES else shown)


def _about(found: Inspection) -> list[list[str]]:
    body = "" if found.body_bits is None else f", {found.body_bits:.2f} without embedding and head"
    rows = [
        ["format", f"{found.format}, {format_bytes(found.bytes)}"],
        ["architecture", _line(found.architecture)],
        ["parameters", f"{found.parameters:,}"],
        ["bits per weight", f"{found.bits_per_weight:.2f}{body}"],
    ]
    if found.adapter is not None:
        rows += _adapter(found.adapter)
    elif found.eyes is not None or found.ears is not None:
        rows += _eyes(found.eyes) if found.eyes else []
        rows += _ears(found.ears) if found.ears else []
    elif found.drafter is not None:
        rows += [*_drafter(found.drafter), *_tokens(found.vocabulary)]
    else:
        rows += [["no engine", _line(found.reason or "")]] if found.spec is None else _shape(found.spec)
        if found.mtp_bytes:
            which = "the first" if found.mtp_layers > 1 else "it"
            use = f"{which} drafts on {', '.join(found.mtp_engines)}" if found.mtp_engines else "left out by engines"
            more = f"{found.mtp_layers} of {format_bytes(found.mtp_bytes)} besides: {use}"
            rows.append(["MTP layers", more])
        rows += _tokens(found.vocabulary)
    rows.append(["stamp", f"{found.stamp} (of samples)"])
    return rows + [["SHA-256", f"{digest} {name}"] for name, digest in found.sha256.items()]


def _adapter(found: AdapterInfo) -> list[list[str]]:
    changes = ", ".join(f"{count} {_line(name)}" for name, count in found.changes.items())
    return [
        ["name", _line(found.name)],
        ["LoRA", f"rank {', '.join(map(str, found.ranks))}, alpha {found.alpha:g}"],
        ["changes", changes],
        ["use", "edge run MODEL --lora FILE"],
    ]


def _drafter(found: DrafterInfo) -> list[list[str]]:
    chosen = f"{found.used} of {found.centroids:,} centroids, " if found.centroids else ""
    reads = f"the states that enter its layers {', '.join(map(str, found.reads))}" if found.reads else "its KV rows"
    return [
        ["drafts", f"for the model whose states have {found.model_width:,} values"],
        ["layers", f"{found.layers} of width {found.width}, for {reads}"],
        ["for a token", f"{chosen}{found.head_rows:,} of {found.vocab:,} rows of the head"],
        ["use", "edge run MODEL --draft FILE"],
    ]


def _eyes(found: EyesInfo) -> list[list[str]]:
    from edge.lab.inspection import EXAMPLE

    width, height = EXAMPLE
    rows, patches = found.example
    fewest, *more = found.rows
    most = f" to {more[-1]:,} tokens (by default at most {found.default_rows:,})" if more else " tokens"
    return [
        ["sees for", f"{', '.join(found.models)} models whose states have {found.model_width:,} values"],
        ["name", _line(found.name)],
        ["layers", f"{found.layers} of width {found.width}, FFN {found.ffn}, {found.heads} heads"],
        ["a picture", f"{fewest:,}{most}, from patches of {found.patch} × {found.patch} pixels"],
        [f"{width} × {height}", f"{rows:,} tokens, from {patches:,} patches"],
        ["use", "edge run MODEL --mmproj FILE --image PICTURE"],
    ]


def _ears(found: EarsInfo) -> list[list[str]]:
    from edge.lab.inspection import HEARD_S

    return [
        ["hears for", f"{', '.join(found.models)} models whose states have {found.model_width:,} values"],
        ["name", _line(found.name)],
        ["layers", f"{found.layers} of width {found.width}, FFN {found.ffn}, {found.heads} heads"],
        [f"{HEARD_S} s", f"{found.rows:,} tokens"],
        ["use", "edge run MODEL --mmproj FILE --audio SOUND"],
    ]


def _shape(spec: ModelSpec) -> list[list[str]]:
    network = spec.network
    attention = [core for core in network.attention if core] if network else []
    sizes = {core.rope: core.head_dim for core in attention}
    positions = "; ".join(
        f"{rope.dim} of {sizes[rope]} values, base {rope.base:,.0f}"
        + (f", {rope.scaling} × {rope.factor:g}" if rope.factor != 1 else "")
        for rope in (network.ropes if network else ())
        if not rope.still
    )
    if network is None:
        positions = f"base {spec.rope_base:,.0f}"
    elif network.learned_positions:
        positions = "learned positions"
    elif rotated := sum(not core.rope.still for core in attention if network.ropes):
        where = "" if rotated == spec.layers else f", in {rotated} of {spec.layers} layers"
        positions = f"RoPE of {positions}{where}"
    else:
        positions = "none"
    windowed = [window for window in spec.windows if window]
    attending = sum(map(bool, spec.kv_values))
    kinds = []
    if spec.recurrent:
        state = (
            f"{format_bytes(spec.state_bytes)} whatever the number of tokens" if spec.state_bytes else "its own size"
        )
        kinds.append(["recurrent state", f"{state}; {attending} of {spec.layers} layers keep KV rows"])
    if shared := sum(core.rows_of is not None for core in attention):
        kinds.append(["shared rows", f"{shared} of {spec.layers} layers read the KV rows of an earlier one"])
    layers = str(spec.layers)
    if spec.ears:  # whose layers are two of the network
        layers = f"{spec.ears.layers} that hear, {spec.layers // 2} that write,"
        kinds.append(["a window", f"{spec.ears.vocab:,} states of {1e3 * WINDOW / spec.ears.vocab:g} ms"])
    if network and network.layer_inputs:
        table = f"{network.layer_inputs} values for each token and layer, {format_bytes(spec.table_bytes)}"
        kinds.append(["per-layer table", table])
    if spec.experts:
        share = spec.expert_parameters / max(1, spec.parameters)
        kinds.append(["experts", f"{spec.experts}, {spec.experts_used} for a token; {share:.0%} of all parameters"])
    return [
        ["name", spec.name],
        ["layers", f"{layers} of width {spec.hidden}, FFN {spec.ffn}"],
        ["heads", f"{spec.heads} of {spec.head_dim} values, {spec.kv_heads} for keys and values"],
        ["head", "the embedding" if spec.tied_head else "its own"],
        ["context", f"{spec.context:,} tokens"],
        ["positions", positions],
        ["windows", f"{max(windowed):,} tokens in {len(windowed)} of {spec.layers} layers" if windowed else "none"],
        *kinds,
    ]


def _tokens(found: Vocabulary) -> list[list[str]]:
    begins = {None: "", True: ", begins with BOS", False: ", no BOS"}[found.adds_bos]
    kind = f"{_line(found.tokenizer)}{f' ({_line(found.pre)})' if found.pre else ''}"
    if found.tokens and not found.known:
        kind += ", by llama.cpp only"
    return [
        ["tokenizer", f"{kind}, {found.tokens:,} tokens, {found.merges:,} merges{begins}"],
        [
            "special tokens",
            ", ".join(f"{name} {_line(text)} ({id_})" for name, (id_, text) in found.special.items()),
        ],
    ]


def _record(found: Inspection, *, tensors: bool) -> dict[str, Any]:
    # JSON has no infinity: the factor of positions that rotate nothing
    record: dict[str, Any] = asdict(
        found, dict_factory=lambda pairs: {key: None if each == inf else each for key, each in pairs}
    )
    record["path"] = str(Path(found.path).absolute())
    record["tensors"] = (
        [{name: each[name] for name in ("name", "shape", "type", "nbytes")} for each in record["tensors"]]
        if tensors
        else len(record["tensors"])
    )
    return record
