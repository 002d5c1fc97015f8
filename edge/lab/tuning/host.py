"""What `edge tune` measures on this device: the native engine on its CPU, or on its GPU."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.base import EngineConfig
from edge.backends.tuning import Field, Values
from edge.backends.tvm import ENGINE
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.gpu import ENGINE as GPU
from edge.backends.tvm.gpu import tuning as gpu
from edge.backends.tvm.gpu.engine import GPUEngine
from edge.backends.tvm.gpu.hosts import choose_adapter
from edge.backends.tvm.sources import source_hash
from edge.backends.tvm.targets import choose_target
from edge.backends.tvm.tuning.lookup import make_subject
from edge.backends.tvm.tuning.space import make_space
from edge.devices.host import usable_cores
from edge.formats.gguf import GGUFFile
from edge.lab.tuning.rig import Depths, Rig
from edge.lab.tuning.setting import Setting
from edge.model.structure.spec import ModelSpec


def host_setting(file: GGUFFile, spec: ModelSpec, kv_dtype: str) -> Setting:
    """The setting to tune for a model on this device."""
    target, depths, cores = choose_target(), Depths.of(spec.context), usable_cores()
    space = make_space(target, kv_dtype, cores, depths.prompt)
    subject = make_subject(spec, target, kv_dtype)

    def load(values: Values) -> NativeEngine:
        config = rig_config(spec, space, kv_dtype, values, cores)
        engine = NativeEngine(file, spec, config)
        for array in engine.kv.store.rows.arrays.values():
            array.fill(1)  # untouched memory is one zero page, which would be too fast
        return engine

    def open_rig(on_compile: Callable[[], None]) -> Rig:
        return Rig(spec, space, load, on_compile)

    return Setting(subject, space, depths.about(), open_rig, source_hash("."), ENGINE.versions())


def gpu_setting(file: GGUFFile, spec: ModelSpec, kv_dtype: str) -> Setting:
    """The setting to tune for a model on the GPU of `EDGE_GPU`, or on the first one."""
    adapter, depths = choose_adapter(), Depths.of(spec.context)
    space = gpu.make_space(adapter, depths.prompt)

    def load(values: Values) -> GPUEngine:
        return GPUEngine(file, spec, rig_config(spec, space, kv_dtype, values, 1))

    def open_rig(on_compile: Callable[[], None]) -> Rig:
        return Rig(spec, space, load, on_compile)

    subject = gpu.make_subject(spec, adapter, kv_dtype)
    return Setting(subject, space, depths.about(), open_rig, source_hash("."), GPU.versions())


def rig_config(spec: ModelSpec, space: tuple[Field, ...], kv_dtype: str, values: Values, cores: int) -> EngineConfig:
    """The engine configuration of a candidate."""
    depths = Depths.of(spec.context)
    return EngineConfig(
        capacity=depths.capacity, chunk=values.get("chunk", depths.prompt), kv_dtype=kv_dtype,
        threads=values.get("threads", cores), tuning={each.name: values[each.name] for each in space if each.compiled},
    )  # fmt: skip
