"""Commands of the laboratory that are refused: each in one line, before any work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from conftest import GOLDEN
from test_cli import edge_here as edge

TEXT = "".join(f"The {number}th stone lies beside the river, and no one has counted it. " for number in range(40))
SEARCH = "search MODEL --backend reference --device raspberry-pi-5 --types q8_0"
KV = "eval kv MODEL --text TEXT --backend reference"
KL = "eval kl MODEL --reference MODEL --text TEXT --backend reference --reference-backend reference --context 32"
EYES = f"MODEL --image 44x30 --mmproj {GOLDEN}/eyes/mmproj.gguf".replace("MODEL", f"{GOLDEN}/eyes/smolvlm.gguf")
DRAWINGS = f"eval tasks {GOLDEN}/eyes/smolvlm.gguf --tasks drawings --backend reference --limit 2"
REFUSED = [
    ("profile MODEL -o a.pdf", "what kind of report"), ("profile MODEL -d 1,x", "-d takes numbers"),
    ("profile MODEL -o /nowhere/a.md", "/nowhere is not there: make that folder first"),
    ("profile MODEL -o TMP/a.html", "is a folder: name a file"), ("profile MODEL -p 100000", "positions"),
    ("profile MODEL -p 64 --max-kv-size 32", "this needs 80 KV rows"),
    ("profile MODEL --sustained 0s", "greater than zero"), ("profile MODEL --sustained 1s", "too short"),
    ("profile MODEL --backend cpu --kv-dtype q8_0", "cpu has no KV dtype 'q8_0'"),
    ("profile compare /dev/zero /dev/zero", "it is no regular file"), ("profile compare MODEL MODEL", "no JSON"),
    ("profile MODEL --backend cpu,none", "unknown backend 'none'"), ("profile", "no MODEL: give one"),
    ("profile MODEL --power 5W", "--power holds the long run only: add its length, such as --sustained 5m"),
    ("profile MODEL --power 5 --sustained 5m --on web:x", "--power cannot be held in a page"),
    ("profile MODEL --power much --sustained 5m", "'much' is not understood"),
    ("profile --read r.json --quick", "--read measures nothing: leave MODEL and the options of measuring out"),
    ("profile MODEL --device pixel-9", "--device goes with --on kit:DIR"),
    ("profile MODEL --on pi", "--on pi is unknown: write kit:DIR, web:DIR, ssh:user@host or adb"),
    ("profile MODEL --on web:", "--on web: is unknown"),
    ("profile MODEL --force", "--force goes with --on kit:DIR or web:DIR"),
    ("profile MODEL --on ssh:-oProxyCommand=x", "names no host"),
    ("profile MODEL --on kit:x --backend onnx", "with the cpu engine, in a kit"),
    ("profile MODEL --on kit:x --device web", "web runs web: kits are for Linux and Android"),
    ("devices add pi nothing.json", "nothing.json: cannot be read"),
    ("devices add a b c", "edge devices add takes a FILE, or a NAME and a FILE, not 3 words"),
    (f"{SEARCH} --device pixel-99", "unknown device 'pixel-99'"),
    (f"{SEARCH} --policies best", "best"), (f"{SEARCH} --tokens 100000", "--tokens must be at most"),
    (f"{SEARCH} --memory 2MiB", "the smallest that fits is --memory"),
    (f"{SEARCH} --text /none.txt", "/none.txt cannot be read"),
    (f"{SEARCH} --text TMP/short.txt", "give a longer one with --text"), (f"{SEARCH} -o a.pdf", "what kind of report"),
    (f"search {GOLDEN}/encoders/bert-cased.gguf", "is an encoder"),
    (f"{SEARCH} --types q9".replace("MODEL", "TMP/short.txt"), "there is no type 'q9'"),  # before a model is read
    (SEARCH.replace("MODEL", "TMP/short.txt"), "short.txt"),
    ("search MODEL --on ssh:board", "--on ssh:board is another machine: name its --device"),
    ("search MODEL --on kit:x --device web", "--on kit:x: a search measures at ssh:user@host"),
    ("search MODEL --on adb:-x --device pixel-9", "--on adb:-x names no device"),
    ("search MODEL --on ssh:board --device pixel-9 --backend onnx", "with the cpu engine, in a kit"),
    ("tune MODEL --device pi5", "--tracker"), ("tune MODEL --tracker localhost:9190", "--key"),
    ("tune MODEL --tracker nowhere --key k", "HOST:PORT"),
    ("tune MODEL --tracker nowhere:1 --key k --target z80", "avx2"), ("tune MODEL --target avx2", "--tracker"),
    ("tune MODEL --time soon", "soon"), ("tune MODEL --kv-dtype q8_0", "q8_0"), ("tune MODEL --show", "edge tune"),
    ("tune", "MODEL"), ("tune MODEL --tracker localhost:1 --key k", "there is no tracker at localhost:1 ("),
    (f"{SEARCH} --kv-dtype int3", "edge: the reference engine has no KV dtype 'int3'"),  # before losses are measured
    (f"{SEARCH} --text /dev/null", "/dev/null is empty"),
    ("compile --catalog --kv-dtype int8 -o TMP/x", "leave MODEL and its options out"),
    ("convert MODEL TMP/x --to coreml --max-kv-size 0 --dry-run", "--max-kv-size must be from 8 to"),
    ("convert MODEL TMP/x.gguf --embedding-type q8_0", "--embedding-type goes with a --type"),
    ("convert MODEL TMP/x.gguf --type q4_0 --target-size 80MiB", "--target-size mixes types as they are measured"),
    (f"quantize MODEL TMP/x.gguf q8_0 --calibration-tokens {10**20}", "is not in the range"),
    ("convert MODEL TMP/x.gguf --type q4_0 --calibration MODEL", "is no text: it has NUL bytes"),
    (f"{KV} --policies h3o", "unknown KV policy 'h3o'"),
    (f"{KV} --policies h2o,,tova", "--policies wants names with commas between"),
    (f"{KV} --tasks speed", "unknown task 'speed': choose perplexity, retrieval, repeat"),
    (f"{KV} --kv-memory 1MiB --max-kv-size 9", "state one"),
    (f"{KV} --max-kv-size 64,-1", "--max-kv-size takes numbers separated by commas, 1 at least"),
    (f"{KV} --kv-dtype int3", "no KV dtype 'int3'"), (f"{KV} --tokens 5000", "--tokens must be at most"),
    (f"{KV} --length 100", "--length 100 leaves no room for text around the key: at least "),
    (f"{KV} --text nope.txt", "no such file"), (f"{KV} -o report.pdf", "what kind of report?"),
    (f"{KV} --resume", "--resume goes with -o FILE"),
    (f"{KL} --reference {GOLDEN}/spm.gguf", "have different vocabularies"),
    (f"{KL} --reference nope.gguf", "no such model file"), (f"{KL} --context 1", "--context"),
    (f"{KL} --context 9999", "at most"), (f"{KL} --text nope.txt", "no such file"),
    (f"{KL} --resume", "--resume goes with -o FILE"), (f"{KL} -o kl.html", "written as .json"),
    (f"{KL} -o /no/such/folder/kl.json", "cannot be written"), (f"{KL} --kv-dtype int3", "no KV dtype"),
    (f"{KL} --max-kv-size 16", "raise --max-kv-size"),
    (f"{KL} --tokens 20 --second-half --context 64", "nothing to predict"),
    ("eval perplexity MODEL --text TEXT --backend reference -o x.json", "go with --context"),
    (f"{DRAWINGS} --mmproj off", "sees no pictures: name its encoder by --mmproj"),
    (f"{DRAWINGS} --num-fewshot 2", "--num-fewshot"), (f"{DRAWINGS} --image-tokens 1", "must be at least 4"),
    ("eval tasks MODEL --tasks drawings,facts --backend reference", "goes alone"),
    ("plan MODEL --device toaster", "unknown device"), ("plan MODEL --device generic-x86", "say --memory"),
    ("plan MODEL --device pixel-9 --backend warp", "unknown backend"), ("plan MODEL --at -1", "--at takes numbers"),
    ("plan MODEL --at", "requires an argument (see edge plan --help)"),
    ("plan MODEL --device macbook-air-m3 --backend cpu", "on macos is planned there, or for exported apps"),
    ("plan MODEL --max-kv-size 64 --at 8,65", "--at 65 is more than the 64 rows of the cache"),
    ("plan MODEL --prompt-tokens 600 --tokens 500", "is more than --tokens 500, which counts prompt and answer"),
    ("plan MODEL --device 'Raspberry Pi 5'", "did you mean raspberry-pi-5?"),
    ("plan MODEL --device rasberry-pi-5", "did you mean raspberry-pi-5?"),
    ("plan MODEL --energy many", "is not understood"),
    ("plan MODEL --device raspberry-pi-5 --threads 99", "--threads 99 is more than the 4 cores of raspberry-pi-5"),
    (f"plan {EYES} --image nowhere", "a size in pixels, such as 1280x720, or a file"),
    (f"plan {EYES} --image 1x60000", "one side is more than 200 times"),
    ("inspect TMP/nope.gguf", "no such model file"), ("inspect TMP", "without an edge.json"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_refusals_are_one_line(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").mkdir()
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    places = {"MODEL": str(GOLDEN / "llama-gqa-tied.gguf"), "TEXT": str(tmp_path / "text.txt")}
    words = [places.get(word, word.replace("TMP", str(tmp_path))) for word in shlex.split(line)]
    done = edge(*words, EDGE_DEVICES=str(tmp_path / "devices"), EDGE_TUNING=str(tmp_path / "tuning"))
    assert (done.returncode, done.stdout) == (3 if "smallest that fits" in said else 2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "devices").exists()
