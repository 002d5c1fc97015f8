"""A model as a bundle for apps: the C library that runs it, model.edge, and the platform's own files.

    edge.h, libedge.a, libedge.so   the C library; Windows has edge.dll and edge.lib; Android and iOS have other layouts
    edge-mini                       a program that answers, for Linux
    model.edge                      weights, tokenizer, chat template and plan
    npu/                            graphs for ONNX Runtime (npu_graphs.py)
    manifest.json                   plan, versions, licences, and the hash of every file; written last

The same inputs give the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.apps.archives import AAR, JAR, check_archive, write_aar, write_jar
from edge.apps.gpu_programs import GPUPrograms, check_gpu, describe_gpu, make_programs
from edge.apps.manifest import MANIFEST, check_target, manifest_text, seal
from edge.apps.npu_graphs import NpuGraphs, describe_npu, plan_graphs
from edge.apps.planning import check_options, own_bytes, plan_bundle, prompt_rows
from edge.apps.platforms import package_of, write_platform
from edge.apps.sections import hearing, model_file
from edge.apps.sections.adapter_file import adapters_section, check_rank
from edge.apps.sections.chat import chat_section
from edge.apps.sections.embedding import embed_section
from edge.apps.sections.encoder_file import EncoderFile, make_encoder, nest
from edge.apps.sections.model_file import MODEL, Section, trusted_source, write_model
from edge.apps.sections.prefix import check_prefix, prefix_section
from edge.apps.sections.tools_file import tools_section
from edge.apps.sections.vocabulary import composing_bytes, tokenizer_sections
from edge.apps.site import describe_ears, describe_gpu_files, describe_site, write_gpu
from edge.backends.checks import app_cores, check_cores
from edge.backends.reference import learned
from edge.backends.tvm import ENGINE as CPU
from edge.backends.tvm.compiler.exported import exported_designs
from edge.backends.tvm.design import Design
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.kv.householder import normals_of
from edge.backends.tvm.kv.row_formats import FORMATS
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.backends.tvm.targets import choose_target
from edge.backends.tvm.tuning.lookup import find_tuned_for
from edge.backends.tvm.tuning.space import compiled_values
from edge.devices.host import usable_cores
from edge.devices.output import check_path, new_folder
from edge.devices.profiles import HOST, find_profile, host_power
from edge.devices.profiles.profile import DeviceProfile, Power
from edge.errors import UnsupportedError
from edge.model.adapters.prefix import PrefixFile
from edge.model.drafters.draft import check_draft
from edge.model.model import Model, open_model
from edge.model.names.catalog import packaged_name
from edge.model.towers.mmproj import AUDIO
from edge.model.whisper import read_whisper
from edge.options import NO_EYES, Options, takes_options
from edge.plan.kv_losses import find_losses
from edge.plan.plan import Plan
from edge.run.speech.plan import check_rows
from edge.storage.fingerprint import fingerprint, hash_file
from edge.storage.versions import own_versions
from edge.types import FloatArray

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords


_log = logging.getLogger("edge")

PIXELS = 32 << 20  # bytes that a plan has for the copies of a picture that the C runtime makes

Progress = Callable[[str, float], None]
"""Called with the name of a step and the fraction of it that is done."""


@dataclass(frozen=True)
class Bundle:
    """A planned bundle."""

    model: Model
    profile: DeviceProfile
    layout: PackedLayout
    plan: Plan
    prompt_rows: int  # the most rows of a system prompt that are pinned
    designs: list[Design]
    tables: dict[Section, bytes]  # the sections that hold texts: tokenizer, words, chat
    gpu: GPUPrograms | None = None
    npu: NpuGraphs | None = None
    encoders: tuple[EncoderFile, ...] = ()  # beside the model
    draft: EncoderFile | None = None  # what drafts, inside model.edge
    prefix: PrefixFile | None = None  # with which every conversation begins
    others: tuple[Design, ...] = ()  # of another machine that model.edge also fits: an emulator's

    @property
    def all_designs(self) -> list[Design]:
        """The model's, then those of encoders and of what drafts."""
        return [*self.designs, *(design for each in self.beside for design in each.designs)]

    @property
    def beside(self) -> list[EncoderFile]:
        """Other passes of the library."""
        return [*self.encoders, *([self.draft] if self.draft else [])]

    def trusted_source(self, sections: dict[Section, bytes]) -> str:
        """The text of trusted.c."""
        encoders = "".join(each.trusted_source() for each in self.beside)
        drafter = self.draft.drafter if self.draft else ""
        return trusted_source(sections, gpu_of_page=self.gpu_of_page, encoders=encoders, drafter=drafter)

    @property
    def gpu_of_page(self) -> bool:
        return self.gpu is not None and self.profile.system == "web"


@takes_options
def export(
    model: str | Path | Model,
    folder: str | Path,
    options: Options | None = None,
    *,
    device: str = HOST,
    isas: str | Sequence[str] | None = None,
    lora_rank: int = 0,
    gpu: bool = False,
    npu: bool = False,
    package: str | None = None,
    abi: str | None = None,
    aar: bool = False,
    sample: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[Keywords],
) -> dict[str, Any]:
    """Make `folder` for apps on a device; returns the content of manifest.json.

    device: its name in `edge devices list`. isas: instruction sets in the library, or their names with commas between
    them (default: all of the machine that the engine has code for). lora_rank: of the largest LoRA adapter that
    sessions have room for (`export_adapter`); 0: none. gpu: with programs and weights for the GPU, of a page by WebGPU,
    on Apple's systems by Metal, else by OpenCL or webgpu.h. npu: with graphs for the device's NPU, or for ONNX Runtime
    on its CPU. package: "c", "kotlin", "swift" or "web" (default: the device's own); Linux has the first three. abi:
    "x86_64", for emulators beside the phone. aar: also a finished AAR, or JAR for desktop JVMs, by Maven. sample: a
    whole project around it, a chat for Android Studio or Xcode. force: a bundle that nothing was added to may be
    replaced. The keywords are options of the plan, as people write them, and go
    before those of `options`:

    OPTIONS

    Raises BudgetError if nothing fits, UnsupportedError for what the C runtime lacks, InputError if the folder cannot
    be written, MissingExtraError without TVM, EngineError if a compiler fails, and the errors of `open_model`.
    """
    check_path("folder", folder)
    options, target = Options.of(options, **keywords), Path(folder)
    profile = find_profile(device)
    package = package_of(profile.system, package)
    check_archive(profile, package, abi, aar=aar)
    check_sample(profile, package, sample=sample)
    check_target(target, force=force)
    if isinstance(isas, str):
        isas = [name.strip() for name in isas.split(",")]
    opened = model if isinstance(model, Model) else open_model(model)
    if sample and opened.template is None and not opened.spec.ears:
        raise UnsupportedError(f"--sample makes a chat, and {opened.name} has no chat template: leave it out")
    bundle = prepare(opened, profile, options, isas, lora_rank, gpu=gpu, npu=npu, mtp=abi is None)
    tell, file = progress or (lambda _step, _part: None), bundle.model.file
    if gpu:
        bundle = with_gpu(bundle, partial(tell, "making kernels"))
    if abi is not None:
        bundle = with_abi(bundle)
    found, sections = fingerprint(file.path), make_sections(bundle)
    with new_folder(target) as made:
        place = write_platform(
            bundle.all_designs, profile.system, bundle.trusted_source(sections), made, partial(tell, "compiling"),
            package=package, others=bundle.others, gpu=bundle.gpu is not None, npu=bundle.npu is not None,
            encoder=bundle.encoders[0].part if bundle.encoders else "", sample=sample,
            peak=0 if bundle.model.spec.encoder else bundle.plan.predicted_peak,
        )  # fmt: skip
        if bundle.gpu and bundle.gpu_of_page:
            write_gpu(bundle.gpu, made)
        if bundle.npu:
            bundle.npu.write(place, partial(tell, "making graphs"))
        write_model(
            place / MODEL, sections, bytes.fromhex(found.sha256), file, bundle.layout,
            partial(tell, "packing weights"), None if bundle.gpu_of_page else bundle.gpu,
            nest(bundle.draft, made) if bundle.draft else b"",
        )  # fmt: skip
        for each in bundle.encoders:
            each.write(place, fingerprint(each.source.file.path).sha256, partial(tell, "packing weights"))
        found.check()
        if aar and profile.system == "android":
            write_aar(made / "edge", made / AAR)
        elif aar:
            write_jar(made / "edge", made / JAR)
        manifest = seal(describe(bundle, found.sha256, made))
        (made / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
        check_target(target, force=force)  # the folder may have changed meanwhile
    return manifest


def prepare(
    model: Model, profile: DeviceProfile, options: Options, isas: Sequence[str] | None = None, lora_rank: int = 0, *,
    gpu: bool = False, npu: bool = False, mtp: bool = True,
) -> Bundle:  # fmt: skip
    """Plan a bundle; nothing is compiled or written. mtp: whether the model's own layer may
    draft. Raises as `export`."""
    check_options(options)
    check_rank(lora_rank)
    if options.prefix_file:
        check_prefix(options.prefix_file, model.spec, accelerated=gpu or npu, adapted=lora_rank > 0)
    if model.spec.ears is not None:
        return prepare_ears(model, profile, options, isas, others=bool(lora_rank or gpu or npu or options.draft))
    if model.file.folder is not None:
        raise UnsupportedError(f"{model.name} is a folder in ONNX: edge export reads GGUF files")
    try:
        check_cores("C runtime of apps", model.spec, app_cores)
        # In WebAssembly, arithmetic takes longer than reading: joining a halved head's bits costs more than it saves.
        layout = make_layout(model.file, model.spec, halve=profile.system != "web")
        model_file.find_table(model.file, layout)
    except UnsupportedError as error:
        why = str(error).partition(": use ")[0]
        raise UnsupportedError(f"{model.name} cannot be exported: {why}") from None
    if model.spec.encoder and lora_rank:
        raise UnsupportedError("bundles of encoders have no room for adapters: leave --lora-rank out")
    ids, words, letters = tokenizer_sections(model.tokenizer)
    tables = {
        Section.TOKENIZER: ids, Section.WORDS: words, Section.NORMALIZER: letters, Section.CHAT: chat_section(model),
        Section.TOOLS: tools_section(model),
        Section.EMBED: embed_section(model, layout),
    }  # fmt: skip
    tables = {section: data for section, data in tables.items() if data}
    if options.prefix_file:  # vectors of texts are made without one
        tables.pop(Section.EMBED, None)
    if options.draft_file:
        check_draft(options.draft_file, model.file, model.spec)
        if gpu or npu:
            raise UnsupportedError("a bundle with --draft runs on the CPU: leave --gpu and --npu out")
    eyes, own = _eyes(model, profile, options, isas, accelerated=gpu or npu), composing_bytes(model.tokenizer)
    heard = 0
    if eyes:
        tables |= {each: eyes.own[each] for each in (Section.EYES, Section.SOUNDS) if each in eyes.own}
        own += eyes.need + (PIXELS if Section.SOUNDS not in eyes.own else hearing.SOUND)
    if eyes and Section.SOUNDS in eyes.own:
        from edge.apps.sections.sounds_file import sound_row_bytes  # here: few bundles hear

        heard = sound_row_bytes(eyes.own[Section.SOUNDS])
    plan = plan_bundle(
        profile, model.spec, options, sum(map(len, tables.values())) + own, lora_rank, gpu=gpu,
        losses=find_losses(model.file, CPU, options), heard=heard, mtp=mtp and not (gpu or npu),
    )  # fmt: skip
    if eyes and plan.policy.needs.looks:
        what = f"KV policy {plan.policy.name}: choose streaming, window or full"
        raise UnsupportedError(f"a bundle with eyes has no {what}")
    if eyes:
        from edge.apps.sections.eyes_file import check_whole

        check_whole(eyes.own[Section.EYES], plan.config.chunk)
    designs = exported_designs(
        layout, plan.config.kv_dtype, profile.arch, profile.system, _tuning(plan, model, profile), isas,
        lora=lora_rank > 0, taps=bool(plan.config.taps),
    )  # fmt: skip
    draft = _draft(model, layout, options, plan, profile, isas)
    pinned = prompt_rows(options, plan.sinks, plan.config.capacity)
    graphs = plan_graphs(model, profile, plan.config) if npu else None
    encoders = () if eyes is None else (eyes.with_threads(plan.config.threads),)
    return Bundle(
        model, profile, layout, plan, pinned, designs, tables, npu=graphs, encoders=encoders, draft=draft,
        prefix=options.prefix_file,
    )  # fmt: skip


def _draft(
    model: Model, layout: PackedLayout, options: Options, plan: Plan, profile: DeviceProfile, isas: Sequence[str] | None
) -> EncoderFile | None:
    """What drafts by a plan."""
    if plan.draft is None:
        return None
    from edge.apps.sections import draft_file as drafting  # here: few bundles have one

    if options.draft_file is None:
        return drafting.plan_mtp_layer(model, layout, plan.draft, profile, isas)
    if options.draft_file.taps:
        return drafting.plan_eagle_head(model, layout, options.draft_file, plan.draft, profile, isas)
    if not options.draft_file.assists:
        return drafting.plan_draft_model(options.draft_file, plan.draft, profile, isas)
    return drafting.plan_assistant(model, layout, options.draft_file, profile, plan.config.kv_dtype, isas)


def _eyes(
    model: Model, profile: DeviceProfile, options: Options, isas: Sequence[str] | None, *, accelerated: bool
) -> EncoderFile | None:
    """The encoder of pictures, or of sounds, that the options name."""
    if options.mmproj is None or options.mmproj == NO_EYES:
        return None
    if accelerated:
        raise UnsupportedError("a bundle with --mmproj runs on the CPU: leave --gpu and --npu out")
    from edge.apps.sections.eyes_file import plan_eyes  # here: few bundles see
    from edge.apps.sections.sounds_file import plan_sounds
    from edge.run.starting.senses import find_ears, find_tower, senses_found

    kv_dtype = "f32" if options.kv_dtype == "f32" else CPU.CAPABILITIES.kv_dtypes[0]
    senses = senses_found(model, options)
    if senses == [AUDIO]:
        return plan_sounds(model, find_ears(model, options), profile, usable_cores(), kv_dtype, isas)
    if AUDIO in senses:
        _log.warning("%s has eyes and ears: the bundle gets its eyes, and hears nothing", options.mmproj)
    return plan_eyes(model, find_tower(model, options), profile, usable_cores(), kv_dtype, isas, options.image_tokens)


def prepare_ears(
    model: Model, profile: DeviceProfile, options: Options, isas: Sequence[str] | None, *, others: bool
) -> Bundle:
    """Plan a bundle of a model that hears: its decoder is the model, its encoder a file beside it. others: whether the
    bundle was to have what only texts take. Raises as `export`."""
    if others:
        raise UnsupportedError(f"{model.name} hears: leave --gpu, --npu, --draft and --lora-rank out")
    check_rows(options.kv_dtype)
    whisper = read_whisper(model.file)
    words = hearing.words_of(model, whisper)
    check_cores("C runtime of apps", words.spec, app_cores)
    ids, texts, _ = tokenizer_sections(model.tokenizer)
    tables = {
        Section.TOKENIZER: ids, Section.WORDS: texts,
        Section.HEARING: hearing.hearing_section(whisper, model.tokenizer),
    }  # fmt: skip
    own = {Section.STEM: hearing.stem_section(model.file, whisper)}
    sizes = sum(map(len, (*tables.values(), *own.values())))
    plan = hearing.plan_ears(profile, whisper, options, own_bytes(profile, words.spec) + sizes)
    config = plan.config
    ears = make_encoder(
        "ears", hearing.Ears.of(model.file, whisper), profile, whisper.positions, config.threads, config.kv_dtype, isas,
        own,
    )  # fmt: skip
    layout = make_layout(words.file, words.spec, halve=profile.system != "web")
    designs = exported_designs(layout, config.kv_dtype, profile.arch, profile.system, None, isas)
    return Bundle(words, profile, layout, plan, 0, designs, tables, encoders=(ears,))


def with_gpu(bundle: Bundle, progress: Callable[[float], None] | None = None) -> Bundle:
    """Add GPU programs. Raises UnsupportedError for features that the GPU hosts lack, MissingExtraError without TVM."""
    config = bundle.plan.config
    languages = check_gpu(bundle.profile.system, bundle.model.spec, config)
    return replace(bundle, gpu=make_programs(bundle.model, languages, config, progress))


def with_abi(bundle: Bundle) -> Bundle:
    """Add code for an emulator on a computer with x86-64."""
    if bundle.beside:
        raise UnsupportedError("bundles that see, hear or have --draft have code for phones alone: leave --abi out")
    config = bundle.plan.config
    others = exported_designs(
        bundle.layout, config.kv_dtype, "x86_64", bundle.profile.system, None, ["avx2"], lora=config.lora_rank > 0
    )
    return replace(bundle, others=tuple(others))


def check_sample(profile: DeviceProfile, package: str, *, sample: bool) -> None:
    """Raise UnsupportedError where no project of a chat is made."""
    if sample and package != "swift" and profile.system != "android":
        raise UnsupportedError(
            "--sample makes projects for Android Studio and Xcode: choose a phone by --device, or leave it out"
        )


def make_sections(bundle: Bundle) -> dict[Section, bytes]:
    """All sections of model.edge except weights and the table of per-layer embeddings."""
    model, layout, plan = bundle.model, bundle.layout, bundle.plan
    config = plan.config
    sections = bundle.tables | {
        Section.CONFIG: model_file.config_section(
            model, layout, config, plan.policy, plan.evict_step, chat=Section.CHAT in bundle.tables,
            sampling=model.sampling(), power=_power(bundle.profile), kv_bytes=plan.bytes.kv,
            scratch_bytes=plan.bytes.scratch, peak=plan.predicted_peak, pinned=bundle.prompt_rows,
            gpu_weights=bundle.gpu.weight_bytes if bundle.gpu and not bundle.gpu_of_page else 0,
        ),
        Section.LAYERS: model_file.layers_section(model, layout, config.kv_dtype),
        Section.DESIGNS: model_file.designs_section(
            model, layout, config, [each.target for each in (*bundle.designs, *bundle.others)]
        ),
        Section.ANGLES: model_file.angles_section(model, layout, config),
        Section.STRINGS: model_file.strings_section(
            _name(model), _license(model), plan.kv_policy.partition(":")[0], config.kv_dtype
        ),
    }  # fmt: skip
    if config.lora_rank:
        of_gpu = bundle.gpu.adapter_bytes if bundle.gpu else 0
        exact = config.kv_dtype == "f32"
        sections[Section.ADAPTERS] = adapters_section(layout, config.lora_rank, exact=exact, gpu=of_gpu)
    if bundle.gpu and not bundle.gpu_of_page:
        sections[Section.GPU] = bundle.gpu.section
    if bundle.npu:
        sections[Section.NPU] = bundle.npu.section()
    if FORMATS[config.kv_dtype].transformed:
        sections[Section.NORMALS] = model_file.normals_section(_normals(bundle))
    if plan.policy.needs.ranks:
        known = learned.find_for(model.file, model.spec, model.tokenizer.encode)
        sections[Section.IMPORTANCE] = model_file.importance_section(model, layout, known)
    if bundle.prefix:
        config = replace(config, threads=usable_cores(), tuning={}, lora_rank=0)
        sections[Section.PREFIX] = prefix_section(bundle.prefix, model, config)
    return sections


def describe(bundle: Bundle, sha256: str, folder: Path) -> dict[str, Any]:
    """The manifest of the files in `folder`. It has no dates and no absolute paths: equal inputs give equal manifests.
    sha256: of the model's file."""
    plan, model = bundle.plan, bundle.model
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": hash_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    web = {}
    if bundle.profile.system == "web":
        web["web"] = describe_site(folder, folder / MODEL, [each.target.name for each in bundle.designs], plan)
        for each in bundle.encoders:
            web["web"][each.part] = describe_ears(folder / each.name) if each.part == "ears" else each.name
        if bundle.gpu:
            web["web"]["gpu"] = describe_gpu_files(bundle.gpu, folder, plan)
    return {
        "model": {
            "name": _name(model), "label": model.spec.label, "file": model.file.path.name,
            "sha256": sha256,
        },
        "device": {"name": bundle.profile.name, "machine": bundle.profile.machine, "system": bundle.profile.system},
        "isas": [each.target.name for each in bundle.designs],
        "plan": {
            "kv_policy": plan.kv_policy, "sinks": plan.sinks, "prompt_rows": bundle.prompt_rows,
            "kv_size": plan.config.capacity, "kv_dtype": plan.config.kv_dtype,
            "prefill_step_size": plan.config.chunk, "threads": plan.config.threads, "evict_step": plan.evict_step,
            "tuning": {each.target.name: compiled_values(each.target) for each in bundle.designs},
            "bytes": {
                "runtime": plan.bytes.interpreter, "weights": plan.bytes.weights, "kv": plan.bytes.kv,
                "scratch": plan.bytes.scratch, "lora": plan.bytes.lora,
                **({"draft": plan.bytes.draft} if bundle.draft else {}),
            },
            "lora_rank": plan.config.lora_rank, "peak": plan.predicted_peak,
        },
        **({"prefix": {"name": bundle.prefix.name, "rows": bundle.prefix.size, "sha256": bundle.prefix.sha256}}
           if bundle.prefix else {}),
        **({"gpu": describe_gpu(bundle.gpu, plan, in_page=bundle.gpu_of_page)} if bundle.gpu else {}),
        **({"npu": describe_npu(bundle.npu, plan)} if bundle.npu else {}),
        "licenses": {"model": _license(model), "runtime": "Apache-2.0"},
        **web,
        "versions": own_versions() | CPU.versions(),
        "files": files,
    }  # fmt: skip


def _tuning(plan: Plan, model: Model, profile: DeviceProfile) -> Callable[[str], dict[str, int]]:
    """A function that returns the settings tuned on the device for an instruction set; empty if there are none."""

    def values(isa: str) -> dict[str, int]:
        if profile.name == HOST:
            return plan.config.tuning if isa == choose_target().name else {}
        tuned = find_tuned_for(model.spec, plan.config.kv_dtype, profile.name, isa)
        return tuned.values if tuned else {}

    return values


def _normals(bundle: Bundle) -> FloatArray:
    """Normals of the keys' Householder reflections, float32 [heads of all layers, head], found with a few tokens."""
    config = replace(bundle.plan.config, threads=usable_cores(), tuning={}, lora_rank=0)
    engine = NativeEngine(bundle.model.file, bundle.model.spec, config)
    try:
        return normals_of(engine.normals) if engine.centred else np.array(engine.normals)
    finally:
        engine.close()


def _power(profile: DeviceProfile) -> Power:
    return host_power() if profile.name == HOST else profile.power or Power()


def _name(model: Model) -> str:
    """The catalogue's name, if there is one: users know it, and it is shorter than a file's."""
    return packaged_name(model.path) or model.spec.name


def _license(model: Model) -> str:
    found = model.file.metadata.get("general.license")
    return found if isinstance(found, str) else ""
