"""A device's specification: every figure with its source and kind. Unknown figures are absent, not guessed."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from edge.devices.cores import speeds_of, worth_using
from edge.records import dataclass
from edge.values import Rule

FigureKind = Literal["measured", "datasheet", "published", "assumed"]
"""measured: on such a device, by the source. datasheet: from its maker; of memory, the bus's theoretical figure.
published: from others. assumed: typical of a class of devices, not measured on this one."""

FIGURES = {
    "memory": "bytes",
    "l1d": "bytes",  # of one of the biggest cores
    "l2": "bytes",  # of one of the biggest cores, or of a cluster that shares it
    "l3": "bytes",
    "read_bandwidth": "B/s",  # with all cores
    "read_bandwidth_one_core": "B/s",
    "bus_bandwidth": "B/s",  # in theory
    "f32_flops": "op/s",  # with all cores
    "int8_ops": "op/s",  # with all cores, multiplying matrices of bytes
    "gpu_read_bandwidth": "B/s",  # of the GPU from the memory that its buffers are in
    "npu_int8_ops": "op/s",  # of the NPU, multiplying matrices: weights of 8 bits
    "npu_int4_ops": "op/s",  # likewise, weights of 4 bits
    "npu_f16_flops": "op/s",  # likewise, inputs in float16, whatever the weights
    "npu_read_bandwidth": "B/s",  # of the NPU from main memory
    "npu_context": "bytes",  # the largest compiled context of the NPU
    "npu_watts": "W",  # of the whole device, while its NPU decodes
    "throttle_celsius": "°C",  # where the device begins to throttle
    "core_watts": "W",  # of a busy core, above idling
    "idle_watts": "W",  # of the whole device
    "dram_pj_per_byte": "pJ/byte",  # of a byte read from memory
}
"""All that a profile may hold, with their units."""

# The assumed share of a bus's theoretical bandwidth that cores reach, where it was not measured. On the Raspberry Pi 5,
# where both are known, one core that only reads reaches 0.82.
BUS_SHARE = 0.6
# An NPU's assumed rate in float16 relative to its rate in int8, where it was not measured: products of floats take
# about four times the transistors.
F16_SHARE = 0.25
# Of the initial speed: a device throttles if it is slower than this at the end of a long run.
SLOWER = 0.9


Text = Annotated[str, Rule("a line of text", lambda text: text.strip() and len(text) <= 2000 and text.isprintable())]
Number = Annotated[int | float, Rule("a number greater than 0", lambda number: 1e-30 < number < 1e18)]
Amount = Annotated[int | float, Rule("a number of at least 0", lambda number: 0 <= number < 1e18)]
Count = Annotated[int, Rule("a whole number from 1 to 4096", lambda count: 1 <= count <= 4096)]
FigureName = Annotated[str, Rule(f"one of {', '.join(FIGURES)}", FIGURES.__contains__)]


def is_name(name: str) -> bool:
    """Whether a name has only letters, digits, - and . and can name a file."""
    return name.isascii() and name.replace("-", "").replace(".", "").isalnum()


@dataclass(frozen=True)
class Figure:
    """A figure of a device."""

    value: Number  # in the unit of FIGURES
    kind: FigureKind
    source: Text  # an address or a document
    note: Text = ""
    threads: Count | None = None  # number of threads of the measurement


@dataclass(frozen=True)
class Cluster:
    """Cores of one kind."""

    kind: Text
    cores: Count
    source: Text
    ghz: Number | None = None  # highest clock; None if unknown
    capacity: Count | None = None  # speed of a core, as Linux reports it; None if unknown
    # Measured by threads on all of these cores; None if unknown.
    read_bandwidth: Number | None = None  # bytes per second
    f32_flops: Number | None = None  # operations per second, in registers
    int8_ops: Number | None = None


@dataclass(frozen=True)
class Npu:
    """A neural processing unit."""

    vendor: Text  # "Qualcomm"
    name: Text  # "Hexagon"
    source: Text  # of the numbers below
    provider: Text | None = None  # ONNX Runtime's execution provider, as --provider names it; None: edge knows none
    soc: Count | None = None  # the vendor's chip number (QNN's soc_model)
    arch: Text | None = None  # instruction set (QNN's htp_arch), such as "75"
    chip: Text | None = None  # the device tree's name of the chip, such as "qcom,sm8650"
    note: Text = ""  # exceptions to the above

    def __str__(self) -> str:
        """For example `Qualcomm Hexagon v75`."""
        return f"{self.vendor} {self.name}" + (f" v{self.arch}" if self.arch else "")


@dataclass(frozen=True)
class Speed:
    """The speed of a model, measured on the device by the native engine in a program without Python."""

    model: Text  # its shape and block types, as in the history of runs
    label: Text
    kv_dtype: Text
    threads: Count
    prompt: Number  # tokens
    prompt_s: Number  # seconds per token of such a prompt
    contexts: tuple[Number, ...]  # rows in the cache at which answers were timed
    token_s: tuple[Number, ...]  # median seconds per token of an answer at each
    source: Text
    # The work of the run, for comparison with other models: the share of the weights' bytes that are multiplied as
    # integers; for the prompt, and for a token at token_context, bytes of weights, bytes of rows, operations, and those
    # of attention.
    integers: Annotated[float, Rule("a share from 0 to 1", lambda share: 0 <= share <= 1)] | None = None
    prompt_work: tuple[Amount, ...] = ()
    token_work: tuple[Amount, ...] = ()
    token_context: Amount = 0
    # The end of a long run without a pause, compared with its beginning.
    sustained_s: Number | None = None  # seconds that it lasted
    sustained_speed: Number | None = None  # speed at its end / at its beginning
    sustained_joules: Number | None = None  # joules per token, likewise; None: no sensor counted them
    sustained_source: Text = ""

    def __post_init__(self) -> None:
        if (self.sustained_s is None) != (self.sustained_speed is None):
            raise ValueError("sustained_s and sustained_speed go together")
        if len(self.contexts) != len(self.token_s):
            raise ValueError("contexts and token_s differ in length")
        if {len(self.prompt_work), len(self.token_work)} not in ({0}, {4}):
            raise ValueError("prompt_work and token_work have four numbers each")
        if self.token_work and (self.token_context not in self.contexts or not self.token_work[0]):
            raise ValueError("token_context is one of contexts, and a token reads weights")
        if self.prompt_work and not self.prompt_work[0]:
            raise ValueError("prompt_work says that a prompt reads no weights")

    @property
    def throttles(self) -> bool:
        """Whether a long run of this setting slowed the device down."""
        return self.sustained_speed is not None and self.sustained_speed < SLOWER


@dataclass(frozen=True)
class Power:
    """Energy costs for the estimate; 0: unknown."""

    core_watts: float = 0.0  # of a busy core, above idle
    idle_watts: float = 0.0  # of the whole device
    dram_pj_per_byte: float = 0.0  # picojoules per byte read from memory
    profile: str = "no profile"  # the profile that the figures come from


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth for a number of threads."""

    bytes_per_s: float
    kind: FigureKind  # of the underlying figure
    about: str  # how it was derived


_APPLE = ("ios", "macos")
_ARCHS = {"AMD64": "x86_64", "arm64": "aarch64"}  # compilers' names of machines, by systems' names


@dataclass(frozen=True)
class DeviceProfile:
    """The specification of a device."""

    name: Annotated[Text, Rule("letters, digits, - and . only", is_name)]
    description: Text
    machine: Text
    models: tuple[Text, ...] = ()  # names in the device tree, or Android's maker and model; * is any text
    isa: Text | None = None  # a target of the native engine; None: the machine's best, or none
    cpu: Text | None = None  # LLVM's name, for scheduling; None as for isa
    system: Text = "linux"
    clusters: tuple[Cluster, ...] = ()  # biggest cores first
    instruction_sets: tuple[Text, ...] = ()
    gpu: Text | None = None
    npu: Npu | None = None
    sensors: tuple[Text, ...] = ()  # names as in `edge devices sensors`
    figures: dict[FigureName, Figure] = field(default_factory=dict)
    sources: tuple[Text, ...] = ()  # of the facts in words
    measured_by: Text | None = None  # the program that measured its ceilings on this very device, and when
    speeds: tuple[Speed, ...] = ()

    def value(self, name: str) -> float | None:
        """A figure of FIGURES by name; None if unknown."""
        return self.figures[name].value if name in self.figures else None

    @property
    def arch(self) -> str:
        """The machine as compilers name it: x86_64, aarch64, wasm32."""
        return _ARCHS.get(self.machine, self.machine)

    @property
    def cores(self) -> int | None:
        return sum(cluster.cores for cluster in self.clusters) or None

    @property
    def threads(self) -> int | None:
        """The cores that a run uses by default; None if unknown. Apple's systems name the fast ones. Clocks count
        on ARM alone: elsewhere, they differ between identical cores."""
        if self.is_apple:
            return self.clusters[0].cores if self.clusters else None
        return worth_using(self._speeds()) or None

    @property
    def is_apple(self) -> bool:
        return self.system in _APPLE

    def _speeds(self) -> list[int]:
        """The speeds of all cores; 0: unknown."""
        if self.arch != "aarch64" or not all(each.ghz or each.capacity for each in self.clusters):
            return [0] * (self.cores or 0)
        cores = [each for each in self.clusters for _ in range(each.cores)]
        return speeds_of((each.capacity or 0, round((each.ghz or 0.0) * 1000)) for each in cores)

    @property
    def memory(self) -> int | None:
        """Bytes; None if unknown, or if variants of the device differ."""
        memory = self.value("memory")
        return None if memory is None else int(memory)

    @property
    def power(self) -> Power | None:
        """Energy costs; None unless a busy core's watts are known."""
        watts = self.value("core_watts")
        if watts is None:
            return None
        return Power(watts, self.value("idle_watts") or 0.0, self.value("dram_pj_per_byte") or 0.0, self.name)

    @property
    def gaps(self) -> tuple[str, ...]:
        """CPU figures that `edge plan` cannot predict because the profile lacks their inputs."""
        known = {
            "memory": self.memory,
            "decoding": self.bandwidth(1),
            "prompts": self.value("f32_flops"),
            "joules": self.power,
        }
        return tuple(name for name, value in known.items() if value is None)

    def bandwidth(self, threads: int) -> Bandwidth | None:
        """Read bandwidth with this many threads: measured, or derived from one core or the bus; None if unknown."""
        all_cores, one = self.figures.get("read_bandwidth"), self.figures.get("read_bandwidth_one_core")
        bus = self.figures.get("bus_bandwidth")
        if all_cores:
            most = all_cores.value if one is None else min(all_cores.value, one.value * threads)
            return Bandwidth(most, all_cores.kind, "read by all cores")
        theory = None if bus is None else bus.value * BUS_SHARE
        if one:
            together = one.value * threads
            if theory is None or min(theory, together) <= one.value:
                return Bandwidth(one.value, one.kind, "read by one core; all together have at least as much")
            if together <= theory:
                return Bandwidth(together, one.kind, "read by one core, times the number of threads")
        if theory is not None:
            return Bandwidth(theory, "assumed", f"{BUS_SHARE:.0%} of what the bus could do in theory")
        return None

    def flops(self, threads: int) -> float | None:
        """float32 operations per second of this many threads on the fastest cores, scaled from the figure for all by
        the cores' speeds; None if unknown."""
        return self._shared("f32_flops", threads)

    def int8_ops(self, threads: int) -> float | None:
        """int8 operations per second of this many threads; None unless measured: vendors' figures are out of reach of
        any program, or another processor's."""
        figure = self.figures.get("int8_ops")
        return self._shared("int8_ops", threads) if figure and figure.kind == "measured" else None

    def npu_named(self, provider: str) -> Npu | None:
        """The NPU, if `provider` is the execution provider that runs on it."""
        return self.npu if self.npu is not None and self.npu.provider == provider.lower() else None

    @property
    def npu_flops(self) -> float | None:
        """Operations per second of the NPU on float16 inputs; None if unknown."""
        int8_ops = self.value("npu_int8_ops")
        return self.value("npu_f16_flops") or (None if int8_ops is None else int8_ops * F16_SHARE)

    def _shared(self, name: str, threads: int) -> float | None:
        figure = self.figures.get(name)
        if figure is None:
            return None
        measured = figure.threads or self.cores or threads
        fastest = sorted(self._speeds(), reverse=True)
        if threads < measured <= len(fastest) and fastest[-1]:
            return figure.value * sum(fastest[:threads]) / sum(fastest[:measured])
        return figure.value * min(1.0, threads / measured)
