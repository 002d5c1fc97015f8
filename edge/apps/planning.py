"""Plans of bundles: the native engine in a process without Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge.apps.gpu_programs import SNAPSHOTS, buffer_bytes
from edge.apps.sections.model_file import POLICIES
from edge.backends import backend_elsewhere
from edge.backends.base import EngineConfig
from edge.backends.checks import app_cores, check_cores
from edge.backends.counts import Footprint
from edge.backends.tvm import CPU, ENGINE
from edge.backends.tvm.targets import app_targets
from edge.budget import format_bytes
from edge.devices.profiles import HOST
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.kv import make_policy
from edge.model.drafters.draft import DraftFile, check_draft
from edge.model.structure.spec import ModelSpec
from edge.options import AUTO, Options
from edge.plan.checks import least_rows
from edge.plan.device import MODULE_MOST, RUNTIME_BYTES, limits_of
from edge.plan.kv_losses import Losses, find_losses
from edge.plan.plan import Plan, make_plan

# Bytes of a WebAssembly module, whose memory counts whether it is used or not: stacks and the tokenizer's buffers; and
# the sampler's bytes for each token of the vocabulary.
MODULE_BYTES, _SAMPLER_BYTES = 10 << 20, 12

_TABLES, _TABLES_BYTES = 33, 64 << 10  # measured bytes per token of the vocabulary (SmolLM2 23, Gemma 3 33); the rest

APP_SYSTEMS = ("web", "android", "ios")  # systems without Python: models are exported

_PROMPT_ROWS = 256  # the most pinned: in f16, a key's float32 copy takes as much as its row


def plan_bundle(
    profile: DeviceProfile, spec: ModelSpec, options: Options, tables: int, lora_rank: int = 0, *, gpu: bool = False,
    losses: Losses | None = None, heard: int = 0, mtp: bool = True,
) -> Plan:  # fmt: skip
    """Plan a bundle. tables: bytes of model.edge besides the weights. lora_rank: of the largest adapter that sessions
    have room for. gpu: the bundle has GPU programs; their buffers count against the limit, but are not in the plan's
    bytes, and the driver's memory is not planned. losses: of KV dtypes, measured on the model; see `resolve`.
    heard: bytes for each row of the longest sound that the KV rows allow. mtp: whether the model's own layer may draft.

    Raises BudgetError if nothing fits, UnsupportedError for features that the C runtime lacks, and InputError.
    """
    try:
        return _plan_bundle(profile, spec, options, tables, lora_rank, gpu, losses, heard, mtp)
    except BudgetError as error:
        if gpu or profile.system != "web" or error.smallest is None or error.smallest <= MODULE_MOST:
            raise
        raise BudgetError(
            f"needs {format_bytes(error.smallest)}, and a WebAssembly module has less than 4 GiB: take a smaller "
            "model, or fewer KV rows with --max-kv-size"
        ) from None


def plan_app(profile: DeviceProfile, file: GGUFFile, spec: ModelSpec, options: Options) -> Plan | None:
    """Plan for a page or a phone as `plan_bundle` does, but estimate the tokenizer's tables, which do not exist yet.

    None for systems that run models without an export; on phones, also for options and models of other engines.
    Raises the errors of `plan_bundle`; for pages also UnsupportedError and InputError for what cannot be exported.
    """
    if profile.system not in APP_SYSTEMS:
        return None
    try:
        check_settings(options)
        backend_elsewhere(CPU.NAME, file, spec, profile.system)
        check_cores("C runtime of apps", spec, app_cores)
    except (UnsupportedError, InputError):
        if profile.system == "web":
            raise
        return None
    if options.draft_file:
        check_draft(options.draft_file, file, spec)
    losses = find_losses(file, ENGINE, options)
    plan = plan_bundle(profile, spec, options, _TABLES * spec.vocab + _TABLES_BYTES, losses=losses)
    chosen = f"{CPU.NAME} is assumed, in an app that edge export makes" if profile.system != "web" else ""
    return replace(plan, chosen=chosen if options.backend == AUTO else "")


def _plan_bundle(
    profile: DeviceProfile, spec: ModelSpec, options: Options, tables: int, lora_rank: int, gpu: bool,
    losses: Losses | None, heard: int, mtp: bool,
) -> Plan:  # fmt: skip
    engine = _Bundled(options, lora_rank, _most_drafts(profile), profile.system if gpu else None, heard, mtp=mtp)
    process = own_bytes(profile, spec) + tables
    limit, threads = (None, None) if profile.name == HOST else limits_of(profile, options)
    plan = make_plan(spec, engine, options, elsewhere=limit, process=process, threads=threads, losses=losses)
    if options.draft_file:
        _check_room(options.draft_file, plan)
    outside = engine.outside(spec, plan.config)
    return replace(
        plan, config=replace(plan.config, lora_rank=lora_rank), predicted_peak=plan.predicted_peak - outside,
        bytes=replace(plan.bytes, scratch=plan.bytes.scratch - outside),
    )  # fmt: skip


def _check_room(draft: DraftFile, plan: Plan) -> None:
    """Raise InputError for too few KV rows of a model that drafts; see runtime/drafting/draft_model.c."""
    if plan.draft is None or draft.assists or draft.taps:
        return
    from edge.run.drafting.draft_model import SINKS  # here: few bundles have one

    own, least = plan.draft.capacity, 2 * (plan.config.drafts + SINKS) + 1
    if own < least:
        advice = "" if own < plan.config.capacity else f"choose --max-kv-size {least} or more, or "
        raise InputError(
            f"--draft {draft.file.path.name} has {own} KV rows, and apps draft with {least} or more: {advice}"
            "leave --draft out"
        )


def _most_drafts(profile: DeviceProfile) -> int:
    """The most drafts that any instruction set of the device verifies at once; 0 for a machine without a library."""
    try:
        targets = app_targets(profile.arch, profile.system)
    except UnsupportedError:
        return 0
    return max(each.gemm_tokens for each in targets) - 1


def own_bytes(profile: DeviceProfile, spec: ModelSpec) -> int:
    """Bytes of a bundle's code and working memory."""
    return MODULE_BYTES + _SAMPLER_BYTES * spec.vocab if profile.system == "web" else RUNTIME_BYTES


def prompt_rows(options: Options, sinks: int, capacity: int) -> int:
    """The most rows of a system prompt to pin; 0 for policies without sinks, and if --keep states the pinned rows."""
    if options.keep is not None or not sinks:
        return 0
    return max(0, min(_PROMPT_ROWS, (capacity - least_rows(0)) // 2))


def check_options(options: Options) -> None:
    """Raises UnsupportedError and InputError for options that no bundle can have."""
    check_engine(options)
    name = options.kv_policy.partition(":")[0]
    if name not in (AUTO, *POLICIES):
        make_policy(options.kv_policy)  # an unknown name is another error
        raise UnsupportedError(f"an exported model has no KV policy {name}: choose auto, {', '.join(POLICIES)}")
    for name in ("time", "energy", "power", "max_temp"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"a bundle has no {flag}: an app states it for each answer, in edge_options")
    if options.lora is not None:
        raise UnsupportedError("a bundle has no --lora: make room with --lora-rank, and files of edge export-adapter")
    for flag, value in (
        ("--provider", options.provider), ("--gpu-layers", options.gpu_layers),
        ("--gpu-memory", options.gpu_memory), ("--prompt-cache", options.prompt_cache),
    ):  # fmt: skip
        if value is not None:
            raise UnsupportedError(f"an exported model cannot have {flag}: leave it out")


def check_settings(options: Options) -> None:
    """As `check_options`, but ignore the limits that an app states for each answer."""
    check_options(replace(options, time=None, energy=None, power=None, max_temp=None))


def check_engine(options: Options) -> None:
    """Raise InputError for an engine other than that of bundles."""
    if options.backend not in (AUTO, CPU.NAME):
        raise InputError(f"--backend={options.backend}: edge export compiles with the {CPU.NAME} engine")


class _Bundled(CPU):
    """The native engine with a bundle's footprint, which includes the keys of a system prompt and snapshots of a
    recurrent state. Weights are mapped and never streamed: on other devices, the system pages them as it likes."""

    MOST_SNAPSHOTS = 0  # counted in `_on_cpu`: they hold the recurrent state alone
    DRAFTS_ELSEWHERE = True

    def __init__(
        self, options: Options, lora_rank: int, drafts: int, gpu: str | None, heard: int, *, mtp: bool
    ) -> None:
        """gpu: the system whose GPU the bundle has programs for. heard: bytes of a sound for each KV row. mtp: whether
        the model's own layer may draft."""
        self._options, self._lora_rank, self._drafts, self._gpu = options, lora_rank, drafts, gpu
        self._heard, self._mtp = heard, mtp

    def most_drafts(self, spec: ModelSpec, tuning: Mapping[str, int]) -> int:
        return 0 if spec.encoder else self._drafts

    def runs_mtp(self, spec: ModelSpec) -> bool:
        return self._mtp and super().runs_mtp(spec)

    def around_bytes(self, spec: ModelSpec) -> int:
        from edge.apps.sections.draft_file import around_bytes  # here: few bundles have one

        return around_bytes(spec)

    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        need = self._on_cpu(spec, config)
        if spec.mtp_of is not None or spec.features:
            return need
        heard = self._heard * config.capacity
        return replace(need, scratch=need.scratch + heard + self.outside(spec, config))

    def outside(self, spec: ModelSpec, config: EngineConfig) -> int:
        """Bytes that a GPU needs in addition to the CPU's. In an app, whose process has one engine at a time, only the
        excess over the CPU's."""
        if self._gpu is None:
            return 0
        need = self._on_cpu(spec, config)
        on_cpu = 0 if self._gpu == "web" else need.weights + need.kv + need.scratch + need.lora
        return max(0, buffer_bytes(self._gpu, spec, replace(config, lora_rank=self._lora_rank)) - on_cpu)

    def _on_cpu(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        pinned = max(config.pinned, prompt_rows(self._options, config.pinned, config.capacity))
        need = super().footprint(spec, replace(config, pinned=pinned, lora_rank=self._lora_rank))
        kv, fixed = (bytes + SNAPSHOTS * spec.state_bytes for bytes in (need.kv, need.fixed_kv))
        return replace(need, kv=kv, fixed_kv=fixed, runtime=0, streamed=0, least_weights=None)
