"""Build llama-server, llama.cpp's own, beside the installed llama-cpp-python, for benchmarks/serving.py.

    python benchmarks/peers/make_server.py [build/mtmd]    # prints the path for --llama-server

Only the server and mtmd are compiled, from the source package of the installed version, and linked with the installed
libraries: so both servers, and edge's llama.cpp engine, share ggml's kernels. It has no page for browsers. Needs pip, a
C++ compiler, 120 MB and four minutes of CPU time.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from make_mtmd import LIBRARIES, compile_unit, fetch, make_mtmd, package, run

# The files that llama.cpp's build would make of the page's parts, without any.
PAGE_H = """#pragma once
#include <array>
#include <string>
struct llama_ui_asset { std::string name; const unsigned char * data; std::size_t size; std::string etag, type; };
const llama_ui_asset * llama_ui_find_asset(const std::string & name);
bool llama_ui_use_gzip();
const std::array<llama_ui_asset, 0> & llama_ui_get_assets();
"""
PAGE_CPP = """#include "ui.h"
const llama_ui_asset * llama_ui_find_asset(const std::string &) { return nullptr; }
bool llama_ui_use_gzip() { return false; }
static const std::array<llama_ui_asset, 0> none{};
const std::array<llama_ui_asset, 0> & llama_ui_get_assets() { return none; }
"""


def make_server(folder: Path) -> Path:
    """The program's path."""
    mtmd = make_mtmd(folder)
    program = mtmd / "llama-server"
    if program.exists():
        return program
    # scikit-build installs what llama.cpp's CMake installs beside the package: libllama-common is there alone.
    installed = package().parent / "lib"
    if not (installed / "libllama-common.so").exists():
        raise SystemExit(f"no libllama-common.so in {installed}: this build of llama-cpp-python leaves it out")
    source, page = fetch(folder, version("llama-cpp-python")), folder / "page"
    page.mkdir(exist_ok=True)
    (page / "ui.h").write_text(PAGE_H)
    (page / "ui.cpp").write_text(PAGE_CPP)
    units = [*sorted((source / "tools" / "server").glob("*.cpp")), page / "ui.cpp"]
    more = (f"-I{page}", f"-I{source / 'tools' / 'server'}", "-DLLAMA_SUBPROCESS")
    objects = [str(compile_unit(source, unit, folder, *more)) for unit in units]  # one by one: each takes a gigabyte
    libraries = [str(installed / f"lib{name}.so") for name in ("llama-common", *LIBRARIES)]
    part, paths = program.with_suffix(".part"), (f"-Wl,-rpath,{installed}", f"-Wl,-rpath,{mtmd.absolute()}")
    run("-o", str(part), *objects, str(mtmd / "libmtmd.so"), *libraries, *paths, "-lpthread")
    part.rename(program)
    return program


if __name__ == "__main__":
    print(make_server(Path(sys.argv[1] if len(sys.argv) > 1 else "build/mtmd")))
