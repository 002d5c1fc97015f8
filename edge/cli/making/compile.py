"""`edge compile`: a model's pass for another device, compiled here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.show import note, print_json, progress, table


def compile(
    model: o.OptionalModelArgument = None,
    *,
    output: Annotated[Path, o.output("The folder to make.")],
    device: Annotated[str | None, o.flag("--device", help="The device's name (edge devices list), or host.")] = None,
    gpu: Annotated[
        str | None, o.flag("--gpu", help="Instead: kernels for any GPU, in wgsl, opencl, metal or cuda.")
    ] = None,
    kv_dtype: Annotated[str, o.flag("--kv-dtype", help="f16, int8, int4 or, for GPUs, f32.")] = "f16",
    weights: Annotated[bool, o.flag("--weights", help="Add the packed weights.")] = False,
    catalog: Annotated[
        bool,
        o.flag("--catalog", help="Instead: the package edge-kernels, for the models of edge models --fits."),
    ] = False,
    models: Annotated[
        str | None, o.flag("--models", help="With --catalog: only these, such as smollm2:135m,qwen3:0.6b.")
    ] = None,
    targets: Annotated[
        str | None, o.flag("--targets", help="With --catalog: only these instruction sets, such as avx2,dotprod.")
    ] = None,
    force: Annotated[bool, o.flag("--force", help="Write into a folder that holds other files.")] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Compile a model for another device: an object file for apps, and an image for edge cache add there. With --gpu:
    the sources of its kernels, and the plan of their dispatches. With --catalog: a package of kernels, with which edge
    runs known models on devices without a compiler; what the folder has of it already is kept."""
    from edge.backends import find_backend
    from edge.cli.targets import check_processor, isa_names
    from edge.devices.profiles import HOST, find_profile
    from edge.errors import InputError, UnsupportedError
    from edge.run.starting.opening import open_model

    if catalog:
        if any((model, device, gpu, weights, kv_dtype != "f16")):
            raise InputError("--catalog has lists of models, CPUs and KV dtypes: leave MODEL and its options out")
        _compile_catalog(output, models, targets, force=force, json=json, quiet=quiet)
        return
    if models is not None or targets is not None:
        raise InputError("--models and --targets choose what --catalog compiles")
    if model is None:
        raise InputError("edge compile needs a MODEL, or --catalog")
    if device is None and gpu is None:
        raise InputError("edge compile needs a device: --device NAME for its CPU, or --gpu LANGUAGE for a GPU")
    if device is not None and gpu is not None:
        raise InputError("--device compiles for a CPU, --gpu for any GPU: give one of them")
    opened = open_model(model)
    if gpu is not None:
        from edge.backends.tvm.gpu.export import export as export_gpu

        with progress(enabled=not quiet) as shown:
            bar = shown.step(f"making kernels in {gpu}")
            about = export_gpu(
                opened.file, opened.spec, gpu, output, kv_dtype=kv_dtype, weights=weights, force=force,
                progress=lambda part: bar(part, 1.0),
            )  # fmt: skip
        _show(about, output, f"any GPU ({gpu})", kv_dtype, json=json, quiet=quiet)
        return
    assert device is not None
    profile = find_profile(device)
    if profile.system not in ("linux", "android"):
        raise UnsupportedError(
            f"edge compile makes code for Linux and Android: use edge export --device {profile.name}"
        )
    check_processor(profile)
    if profile.isa is None and profile.name != HOST:
        names = ", ".join(isa_names(profile)) or f"but none is known of {profile.machine}"
        raise InputError(f"the profile of {profile.name} does not say its isa: add one to it: {names}")
    find_backend("cpu", opened.file, opened.spec)
    from edge.backends.tvm.export import export

    with progress(enabled=not quiet) as shown:
        bar = shown.step(f"compiling for {profile.name}")
        about = export(
            opened.file, opened.spec, profile, output, kv_dtype=kv_dtype, weights=weights, force=force,
            progress=lambda part: bar(part, 1.0),
        )  # fmt: skip
    _show(about, output, f"{profile.name} ({about['design']['target']['name']})", kv_dtype, json=json, quiet=quiet)


def _compile_catalog(
    folder: Path, models: str | None, targets: str | None, *, force: bool, json: bool, quiet: bool
) -> None:
    from edge.backends.tvm.compiler.catalog import compile_catalog
    from edge.backends.tvm.compiler.package import PACKAGE
    from edge.errors import InputError, several

    if not force and folder.is_dir() and any(folder.iterdir()) and not (folder / PACKAGE).is_dir():
        raise InputError(f"{folder} holds other files: --force writes beside them")

    def names(text: str | None) -> list[str] | None:
        return None if text is None else [part.strip() for part in text.split(",")]

    with progress(enabled=not quiet) as shown:

        def finished(path: Path) -> None:
            shown.clear()
            if not quiet:
                note(f"{path.name}: {format_bytes(path.stat().st_size)}")

        def tell(name: str, part: float) -> None:
            shown.step(f"compiling {name}")(part, 1.0)

        made = compile_catalog(folder, names(models), names(targets), tell, finished)
    size = made.wheel.stat().st_size
    volumes, designs = len(made.index.volumes), sum(len(each.designs) for each in made.index.volumes.values())
    if json:
        about = {"volumes": volumes, "designs": designs, "left_out": made.left_out}
        print_json({"wheel": str(made.wheel), "bytes": size, **about})
        return
    print(f"{made.wheel}: {designs:,} passes in {several(volumes, 'file')}, {format_bytes(size)}")
    for name, why in made.left_out.items():
        note(f"left out: {name}: {why}")


def _show(about: dict[str, Any], output: Path, target: str, kv_dtype: str, *, json: bool, quiet: bool) -> None:
    if json:
        print_json({"folder": str(output), **about})
    if json or quiet:
        return
    rows = [[name, format_bytes(each["bytes"])] for name, each in about["files"].items()]
    print(table([str(output), "size"], rows))
    print(f"\n{about['model']} for {target}, {kv_dtype} KV")
