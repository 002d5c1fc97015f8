"""Build llama-server, llama.cpp's own, beside the installed llama-cpp-python, for benchmarks/serving.py.

    python benchmarks/peers/make_server.py [build/mtmd]    # prints the path for --llama-server

Only the server, its common code and mtmd are compiled, from the source package of the installed version, and linked
with the installed libraries: so both servers, and edge's llama.cpp engine, share ggml's kernels. It has no page for
browsers. Needs pip, a C++ compiler, 120 MB and five minutes of CPU time.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
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
    installed = package() / "lib"
    source, page = fetch(folder, version("llama-cpp-python")), folder / "page"
    page.mkdir(exist_ok=True)
    (page / "ui.h").write_text(PAGE_H)
    (page / "ui.cpp").write_text(PAGE_CPP)
    build = (source / "common" / "build-info.cpp.in").read_text()
    (page / "build.cpp").write_text(re.sub("@[A-Z_]+@", "0", build))
    # llama-cpp-python may be installed without libllama-common (tests/llamacpp.cmake).
    folders = [source / each for each in ("common", "vendor/cpp-httplib", "tools/server")]
    units = [*(unit for each in folders for unit in sorted(each.rglob("*.cpp"))), page / "ui.cpp", page / "build.cpp"]
    more = (f"-I{page}", f"-I{source / 'tools' / 'server'}", "-DLLAMA_SUBPROCESS")
    with ThreadPoolExecutor(2) as pool:  # each takes a gigabyte
        objects = list(pool.map(lambda unit: str(compile_unit(source, unit, folder, *more)), units))
    libraries = [str(installed / f"lib{name}.so") for name in LIBRARIES]
    part, paths = program.with_suffix(".part"), (f"-Wl,-rpath,{installed}", f"-Wl,-rpath,{mtmd.absolute()}")
    run("-o", str(part), *objects, str(mtmd / "libmtmd.so"), *libraries, *paths, "-lpthread")
    part.rename(program)
    return program


if __name__ == "__main__":
    print(make_server(Path(sys.argv[1] if len(sys.argv) > 1 else "build/mtmd")))
