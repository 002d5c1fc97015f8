"""`edge export`: a model as a C library with a model file, for apps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.show import print_json, progress, table
from edge.options import Options


@o.command
def export(
    model: o.ModelArgument,
    output: Annotated[Path, o.output("The folder to make.")],
    device: Annotated[
        str, o.flag("--device", help="The device to export for, by its name in edge devices list (default: this one).")
    ] = "host",
    *,
    options: Annotated[
        Options,
        o.without(
            "time", "energy", "power", "max_temp", "gpu_memory", "prompt_cache", "prompt_cache_size", "backend",
            "provider", "gpu_layers", "lora", "sequences", "chat_template",
            "image_tokens",
        ),
    ],
    isa: Annotated[
        str | None,
        o.flag("--isa", help="Instruction sets in the library, such as avx2,avxvnni (default: all of the machine)."),
    ] = None,
    lora_rank: Annotated[
        int, o.flag("--lora-rank", help="Room for LoRA adapters up to this rank, which edge export-adapter makes.")
    ] = 0,
    gpu: Annotated[
        bool, o.flag("--gpu", help="With programs for a GPU, too: WebGPU in pages; OpenCL, webgpu.h or Metal in apps.")
    ] = False,
    npu: Annotated[
        bool,
        o.flag("--npu", help="With graphs for ONNX Runtime, too: for the NPU of --device, or its CPU."),
    ] = False,
    package: Annotated[
        str | None, o.flag("--package", help="c, kotlin, swift or web (default: the device's; Linux has three).")
    ] = None,
    abi: Annotated[str | None, o.flag("--abi", help="x86_64: for Android's emulators on such computers, too.")] = None,
    aar: Annotated[
        bool, o.flag("--aar", help="Also a finished AAR for Android, or JAR for desktop JVMs, compiled by Maven.")
    ] = False,
    sample: Annotated[
        bool, o.flag("--sample", help="A whole project around it: a chat for Android Studio or Xcode.")
    ] = False,
    force: Annotated[bool, o.flag("--force", help="Replace an older bundle that nothing was added to.")] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Export a model for apps: a C library without Python, the model as one mapped file, an example, and a README.

    For Android the folder is a library module in Kotlin, for iOS a Swift package (for Linux with --package swift), for
    web a site with a chat page and a JavaScript package, else it is for C and C++, for Windows with a DLL. Of the KV
    policies, apps have streaming, window, full, h2o and kvzap.
    """
    from edge.apps.bundle import export as make
    from edge.apps.manifest import MANIFEST

    with progress(enabled=not quiet) as shown:
        manifest = make(
            model, output, options, device=device, isas=isa, lora_rank=lora_rank, gpu=gpu, npu=npu, package=package,
            abi=abi, aar=aar, sample=sample, force=force,
            progress=lambda step, part: shown.step(step)(part, 1.0),
        )  # fmt: skip
    if json:
        print_json({"folder": str(output), **manifest})
    if json or quiet:
        return
    sizes = {name: each["bytes"] for name, each in manifest["files"].items()}
    sizes[MANIFEST] = (output / MANIFEST).stat().st_size
    print(table([str(output), "size"], [[name, format_bytes(size)] for name, size in sizes.items()]))
    plan = manifest["plan"]
    print(
        f"\n{manifest['model']['label']} for {manifest['device']['name']} ({', '.join(manifest['isas'])}): "
        f"{plan['kv_size']} KV rows, {plan['kv_dtype']}, policy {plan['kv_policy']}, "
        f"peak {format_bytes(plan['peak'])} (estimated)"
    )
    if found := manifest.get("gpu"):
        sizes, driver = found["bytes"], found.get("driver")
        print(
            f"On a GPU ({', '.join(found['languages'])}): {format_bytes(sum(sizes.values()))} of buffers, of which "
            f"{format_bytes(sizes['weights'])} weights and {format_bytes(sizes['kv'])} KV rows; "
            f"peak {format_bytes(found['peak'])} (estimated"
            + (
                f"; {format_bytes(driver['bytes'])} for the driver, {driver['source']}, not counted by --memory"
                if driver
                else ""
            )
            + ")"
        )
    if found := manifest.get("npu"):
        print(
            f"Through ONNX Runtime ({found['provider']}): {found['rows']} KV rows, chunks of {found['chunk']}; "
            f"peak {format_bytes(found['peak'])} (estimated: {found['source']})"
        )
