"""Compiled passes of this machine: found in the cache folder or compiled, and loaded.

Loading a cached pass needs no part of TVM. A device without TVM runs passes that were compiled elsewhere: those that
were added to its cache (`export.py`), and those of the package `edge-kernels` (`package.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

from edge.backends.tvm.cpu.elf import Image
from edge.backends.tvm.design import Design
from edge.backends.tvm.sources import PASS, source_hash
from edge.devices.child import run_child
from edge.devices.keys import key_of
from edge.errors import MissingExtraError
from edge.model.cores import Attention
from edge.storage import cache
from edge.types import Progress

_PACKAGES = ("tvm", "tvm_ffi")
_COMPILE_TIMEOUT_S = 600.0

# Of the child that compiles. Measured with SmolLM2, Gemma 3 270M and golden models: 147 to 210, 213 to 286 MiB, most
# where matrices of one group have several block types, each of which has code of its own.
# For apps, whose passes are one object file each: 163 to 228, 218 to 261.
FRUGAL_BYTES, QUICK_BYTES, VARIANT_BYTES = 168 << 20, 288 << 20, 24 << 20
APP_FRUGAL_BYTES, APP_QUICK_BYTES = 224 << 20, 280 << 20
# More for each kind of attention with wide heads, for int4 and other rows. Measured with heads of 512: Gemma 4 E2B
# takes 367 MiB, with int4 468, frugal 303; 26B-A4B 337, frugal 237.
WIDE_HEAD, WIDE_INT4_BYTES, WIDE_BYTES = 256, 96 << 20, 72 << 20
# More for both forms of latent attention: one layer of Youtu-LLM takes 399 MiB.
LATENT_BYTES = 48 << 20


@functools.cache  # a plan asks ten times
def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in _PACKAGES)


def compiled(design: Design, progress: Progress | None = None, *, frugal: bool = False) -> Image:
    """The design's functions; if the cache lacks them, from the package `edge-kernels`, else compiled in a child
    process. frugal: in less memory, which takes twice as long.

    Raises EngineError if TVM's compiler fails or the package is damaged, MissingExtraError if there is no compiler,
    EdgeError if the cache folder cannot be written.
    """
    design = _at_hand(design)

    def make(out: Path) -> None:
        from edge.backends.tvm.compiler import package

        if package.holds(package_key(design)):
            out.write_bytes(package.packaged_image(package_key(design)))
            return
        if not is_installed():
            raise missing(design)
        compile_design(design, out, progress=progress, frugal=frugal)

    return _load(cache.find_or_make("kernels", design_key(design), ".img", make, about=about_design(design)))


def compiler_bytes(design: Design, *, frugal: bool) -> int:
    """The peak of the child that compiles a design."""
    frugal_bytes, quick_bytes = (APP_FRUGAL_BYTES, APP_QUICK_BYTES) if design.exported else (FRUGAL_BYTES, QUICK_BYTES)
    more = sum(len(each) - 1 for each in design.variants.values())
    wide = sum(core.head_dim > WIDE_HEAD for core in design.shape.cores(Attention))
    of_heads = wide * (WIDE_INT4_BYTES if design.kv_dtype == "int4" else WIDE_BYTES)
    latent = LATENT_BYTES * any(core.latent for core in design.shape.cores(Attention))
    return (frugal_bytes if frugal else quick_bytes) + more * VARIANT_BYTES + of_heads + latent


def is_compiled(design: Design) -> bool:
    found = _at_hand(design)
    return _is_cached(found) or _is_packaged(found)


def _at_hand(design: Design) -> Design:
    """The design, or, if only that is compiled, the same with code for drafts, which a plan's budget may exclude."""
    if design.batches or design.exported:
        return design
    more = replace(design, batches=[design.most_tokens])
    for is_there in (_is_cached, _is_packaged):
        for each in (design, more):
            if is_there(each):
                return each
    return design


def _is_cached(design: Design) -> bool:
    return cache.find("kernels", design_key(design), ".img") is not None


def _is_packaged(design: Design) -> bool:
    from edge.backends.tvm.compiler.package import holds  # here: most starts find their image in the cache

    return holds(package_key(design))


def has_passes() -> bool:
    """Whether some model runs without a compiler."""
    from edge.backends.tvm.compiler import package

    found = package.installed()
    return bool(cache.entries("kernels") or (found and found.usable))


def nothing_to_run() -> MissingExtraError:
    """The error where no model runs."""
    return MissingExtraError(
        "apache-tvm", "tvm", f" compiles models{_other_version() or ', edge-runtime[kernels] has known ones'}"
    )


def missing(design: Design) -> MissingExtraError:
    """The error for a design that is not at hand where nothing can compile it."""
    return MissingExtraError(
        f"compiled code for this model ({about_design(design)}) is not here, and apache-tvm", "tvm",
        f" makes it{_other_version()}; or, on another computer, edge compile MODEL --device DEVICE -o DIR, and here "
        "edge cache add DIR",
    )  # fmt: skip


def _other_version() -> str:
    from edge.backends.tvm.compiler import package

    found = package.installed()
    other = found is not None and not found.usable
    return f" ({package.DISTRIBUTION} is of another version of edge)" * other


def install(design: Design, image: bytes) -> None:
    """Add an image that was compiled elsewhere to the cache. Raises EdgeError if that cannot be written."""
    with cache.create("kernels", design_key(design), ".img", about_design(design)) as out:
        out.write_bytes(image)


def compile_design(design: Design, *out: Path, progress: Progress | None = None, frugal: bool = False) -> None:
    """Write the image to the first path, and the object file to a second; of an exported design only the object file.

    Raises EngineError if TVM's compiler fails, MissingExtraError if it is not installed.
    """
    if not is_installed():
        raise MissingExtraError("apache-tvm", "tvm")
    request = {"design": design.to_json(), "frugal": frugal, "out": [str(path.absolute()) for path in out]}
    run_child(
        "edge.backends.tvm.compiler.child", request, lambda said: progress(said["done"]) if progress else None,
        timeout=_COMPILE_TIMEOUT_S, failure="TVM's compiler failed (--backend=llamacpp needs none)",
        takes=compiler_bytes(design, frugal=frugal), purpose="compiles",
    )  # fmt: skip


def design_key(design: Design) -> str:
    """A hash of everything that compiled code depends on, without the compiler if none is installed."""
    return _key(design, compiler_size())


def package_key(design: Design) -> str:
    """As `design_key`, without the compiler: the key in packages, one release of which has one compiler."""
    return _key(design, 0)


def _key(design: Design, compiler: int) -> str:
    return key_of(f"{design.to_json()}\n{source_hash(*PASS)}\n{compiler}")


def about_design(design: Design) -> str:
    marks = ", timed" * design.timed + ", LoRA" * design.lora + ", for apps" * design.exported
    return f"{design.shape.layers} layers, {design.kv_dtype} KV, {design.target.name}{marks}"


@functools.cache
def compiler_size() -> int:
    """The compiler library's size, which stands for its version: looking that up takes 20 ms. 0 without TVM."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        return 0
    name = {"win32": "tvm_compiler.dll", "darwin": "libtvm_compiler.dylib"}.get(sys.platform, "libtvm_compiler.so")
    return (Path(spec.origin).parent / "lib" / name).stat().st_size


_load = functools.lru_cache(Image)  # engines of the same design share its code
