"""The `edge` command as a person or a script meets it: outputs, exit codes, one-line errors."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from fork_server import COMMAND, LABORATORY, forking
from small_models import Small, write_small

from edge.cli import run_command

MODEL = "smollm2-135m"
TINY = str(Path(__file__).parents[1] / "golden" / "llama-gqa-tied.gguf")
REPORT_KEYS = {
    "text": None,
    "tokens": {"prompt", "generated", "reused", "ran", "unread", "forced", "prefix"},
    "timings": {
        "load_s", "ttft_s", "prefill_tok_s", "decode_tok_s", "paused_s", "total_s", "before_s", "budget_s",
        "prepared_s",
    },
    "stop_reason": None,
    "memory": {
        "peak_rss", "budget", "weights", "kv", "scratch", "interpreter", "anonymous", "file", "streamed", "measured",
        "experts", "lora", "gpu", "on_card", "gpu_used", "gpu_budget", "draft",
    },
    "kv": {"policy", "capacity", "rows", "dtype", "evicted"},
    "energy": {
        "joules", "budget", "prefill", "decode", "per_token", "source", "kind", "scope", "samples", "before", "watts",
        "watts_limit", "prepared",
    },
    "heat": None,
    "actions": None,
    "thoughts": None,
    "media": None,
    "lora": None,
    "prefix": None,
    "team": {"passes"},
    "plan": None,
    "versions": None,
    "seed": None,
    "drafted": None,
    "tool_calls": None,
    "stop_text": None,
    "incomplete": None,
    "logprobs": None,
    "beams": None,
    "sources": None,
    "pruned": None,
    "branched": None,
    "schema": None,
}  # fmt: skip
OF_LABORATORY = (
    "cache", "compile", "convert", "devices", "eval", "export", "inspect", "models", "profile", "quantize", "search",
    "tune",
)  # fmt: skip


def edge(*args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own. With a budget of memory it starts as users start it."""
    plain = "run" in args and "--memory" in args
    prepared = LABORATORY if args[:1] and args[0] in OF_LABORATORY else COMMAND
    return subprocess.run(
        [sys.executable, "-m", "edge", *args] if plain else forking(prepared, "edge", *args),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
        encoding="utf-8",
    )


def edge_json(*args: str, **more: Any) -> Any:
    return _json_of(edge(*args, **more))


def edge_here(*args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, for a fifth of what a process costs: what it prints, and how it ends. For tests
    that look at memory, signals, first runs or the streams themselves, `edge` is right."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for name in ("stdin", "stdout", "stderr")}
    streams["stdin"] = io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
    warnings = logging.StreamHandler(streams["stderr"])  # which Python prints where nothing else handles them
    warnings.setLevel(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("leave_at_once", "raise_interrupts", "terminal.streams.open_streams"):
            patch.setattr(f"edge.cli.{name}", lambda: None)
        patch.setattr("gc.set_threshold", lambda _: None)
        patch.setattr(sys, "argv", ["edge", *args])
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        for name, value in environment.items():
            patch.setenv(name, value)
        logging.getLogger("edge").addHandler(warnings)
        try:
            code = run_command()
        finally:
            logging.getLogger("edge").removeHandler(warnings)
    said = []
    for name in ("stdout", "stderr"):
        streams[name].flush()
        said.append(streams[name].buffer.getvalue().decode())
    return subprocess.CompletedProcess(args, code, *said)


def json_here(*args: str, **more: Any) -> Any:
    return _json_of(edge_here(*args, **more))


def _json_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_run_prints_report_line() -> None:
    assert edge("run", MODEL, "-p", "What fruit?", "-n", "8", "-q").stderr == ""  # also if it is the first run
    done = edge("run", MODEL, "What fruit?", "-n", "8", "--ignore-eos", "--memory", "256MiB", stdin="A red apple.")
    assert (done.returncode, bool(done.stdout.strip())) == (0, True)
    (line,) = [line for line in done.stderr.splitlines() if "tok/s" in line]  # slow machines also leave progress
    assert re.fullmatch(
        r"8 tokens at [\d,]+ tok/s · first after [\d.]+ s · peak \d+ MiB of 256 MiB · [\d.]+ m?J "
        r"\((measured|estimated)\) · stopped: length · -v: more",
        line,
    )
    said = edge("run", TINY, "-p", "Hi", "-n", "4", "--raw", "-v").stderr
    assert "(measured)" in said
    assert "(counted)" in said


def test_report_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)`", text))
    for name, keys in REPORT_KEYS.items():
        assert name in documented
        assert {f"{name}.{key}" for key in keys or ()} <= documented


def test_prompt_may_come_from_stdin_or_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Name a colour.", encoding="utf-8")
    flags = ("run", TINY, "-n", "8", "--json", "--backend", "reference")
    by_flag = json_here(*flags, "-p", "Name a colour.")["text"]
    assert json_here(*flags, "-p", "Name another.")["text"] != by_flag
    assert json_here(*flags, stdin="Name a colour.")["text"] == by_flag
    assert json_here(*flags, "-f", str(tmp_path / "prompt.txt"))["text"] == by_flag


def test_environment_twins_work_and_flags_win() -> None:
    variables = {"EDGE_MAX_TOKENS": "3", "EDGE_JSON": "1", "EDGE_KV_POLICY": "window", "EDGE_BACKEND": "reference"}
    flags = ("run", TINY, "-p", "Hi", "--ignore-eos")
    assert json_here(*flags, **variables)["tokens"]["generated"] == 3
    report = json_here(*flags, "-n", "2", **variables)
    assert report["tokens"]["generated"] == 2
    assert report["kv"]["policy"] == "window"


@pytest.mark.parametrize(("args", "code", "says"), [
    (["run", "nope.gguf", "-p", "x"], 2, "no such model file"), (["run", ".", "-p", "x"], 2, "is a folder"),
    (["run", __file__, "-p", "x"], 2, "not a GGUF file"), (["run", "", "-p", "x"], 2, "empty: known names are"),
    (["run", MODEL, "-f", str(GOLDEN / "llama-llama3.gguf")], 2, "is no text: it has NUL bytes"),
    (["run", MODEL, "-p", "x", "-n", "99999999999999999999"], 2, "--max-tokens must be at most"),
    (["run", MODEL, "-p", "x", "--json-schema", __file__], 2, "test_cli.py: the JSON schema is not JSON"),
    (["eval", "perplexity", MODEL], 2, "(see edge eval perplexity --help)"),
    (["run", MODEL, "-p", "x", "--memory", "lots"], 2, "write it like 256MiB"),
    (["run", MODEL, "-p", "x", "--memory", "64MiB"], 3, "the smallest that fits is --memory"),
    (["run", MODEL, "-p", "x", "--time", "soon"], 2, "write it like 20s"),
    (["run", TINY, "x", "-q", "--backend", "reference", "--energy", "0.001mJ"], 3, "mJ is spent"),
    (["run", MODEL, "-p", "x", "-n", "0"], 2, "--max-tokens"),
    (["run", MODEL, "-p", "x", "--kv-policy", "magic"], 2, "choose auto, streaming, window, full"),
    (["run", MODEL, "-p", "x", "--kv-policy", "keydiff", "--backend", "llamacpp"], 2, "use --kv-policy streaming"),
    (["run", MODEL, "-p", "x", "--kv-policy", "knorm", "--backend", "reference"], 2, "use --kv-policy streaming"),
    (["run", MODEL, "-p", "x", "--max-kv-size", "100000"], 2, "the model knows 8192 positions"),
    (["run", MODEL, "-p", "x", "--backend", "magic"], 2, "unknown backend"),
    (["run", MODEL, "-p", "-", "-f", "y"], 2, "not both"), (["run", MODEL, "-p", "x", "--magic"], 2, "No such option"),
    (["run", MODEL, "-p", "hi", "--beams", "2", "--draft", MODEL], 2, "goes without --draft"),
    (["run", MODEL, "x", "--stop", ""], 2, "--stop must be text that is not empty"),
    (["run", MODEL, "-p", ""], 2, "the prompt is empty"), (["run", MODEL, "-p", " \n"], 2, "blanks alone"),
    (["run", MODEL, "x", "--prompt-cache", __file__], 2, "test_cli.py is a file: name a folder"),
    *(([each, MODEL, "-o", ""], 2, "-o must be a path, not") for each in ("export", "compile")),
    (["run", MODEL], 2, "stdin is empty"), (["run"], 2, "MODEL"),
    *((["run", MODEL, "-p", "x", each, ""], 2, f"{each} must be a path, not ''")
      for each in ("--prefix", "--chat-template", "--prompt-cache")),
    (["run", MODEL, "x", "--mmproj", "nope.gguf"], 2, "--mmproj nope.gguf: no such file"),
    (["run", MODEL, "x", "--image", "https://x.org/a.png"], 2, "https://x.org/a.png: addresses are not fetched"),
    (["run", MODEL, "x", "--prefix", "a", "--prefix=b"], 2, "--prefix is stated twice"),
    (["convert", "x", "y.gguf", "--base", MODEL, "--dry-run"], 2, "leave --dry-run out"),
    (["magic"], 2, "No such command"), (["plan", MODEL, "--memory", "32MiB"], 3, "the smallest that fits"),
    (["bench", MODEL, "-p", "many"], 2, "numbers separated by commas"),
    (["bench", MODEL, "-d", "9000"], 2, "the model knows 8192"),
    (["bench", MODEL, "-p", "0", "-n", "0"], 2, "nothing to measure"),
    (["eval", "perplexity", MODEL, "--text", "nope.txt"], 2, "no such file"),
    (["serve", TINY, "--host", "0.0.0.0"], 2, "--api-key"), (["serve", TINY, "--port", "70000"], 2, "65535"),
    (["serve", TINY, "--adapter", "x"], 2, "--adapter"),
    (["serve", TINY, TINY], 2, "same name"), (["serve", TINY, "--max-tokens", "0"], 2, "--max-tokens"),
    (["cache", "clear", "--kind", "things"], 2, "choose "),
])  # fmt: skip
def test_bad_input_gets_one_line_and_exit_code(args: list[str], code: int, says: str) -> None:
    done = edge_here(*args)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("variable", "value"), [
    ("EDGE_QUIET", "x"), ("EDGE_MAX_TOKENS", "abc"), ("EDGE_MEMORY", "64"), ("EDGE_ENERGY", "5"),
    ("EDGE_THREADS", "99999"),
])  # fmt: skip
def test_bad_variable_is_named(variable: str, value: str) -> None:
    said = edge_here("run", MODEL, "-p", "x", **{variable: value}).stderr
    assert variable in said
    assert ": ," not in said
    assert "--" not in said.replace("(see edge run --help)", "")
    flag = f"--{variable[5:].lower().replace('_', '-')}"
    if variable != "EDGE_QUIET":
        assert variable not in edge_here("run", MODEL, "-p", "x", flag, value, **{variable: value}).stderr


def test_missing_extra_is_named_for_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "PIL.Image", "soundfile"):
        monkeypatch.setitem(sys.modules, name, None)
    text, picture, sound = (tmp_path / name for name in ("a.txt", "a.png", "a.flac"))
    text.write_text("Some text.\n")
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    sound.write_bytes(b"fLaC" + bytes(40))
    for path, says in ((tmp_path / "no.jpg", "no.jpg: no such file"), (picture, "sees no pictures")):
        said = edge_here("run", MODEL, "-p", "x", "--image", str(path)).stderr
        assert says in said
        assert "Pillow" not in said
    for path, says in ((text, "a.txt is no sound"), (sound, "a.flac is no WAV of PCM, and soundfile, which")):
        assert says in edge_here("run", MODEL, "-p", "x", "--audio", str(path)).stderr


@pytest.mark.parametrize(("source", "more", "says"), [
    ("no Jinja in it", (), "the chat template .*plain.txt drops the user's text"),
    ("{{ messages[-1].content }}", ("--think", "on"), "does not think, by the chat template .*plain.txt: leave"),
])  # fmt: skip
def test_stated_template_is_named(source: str, more: tuple[str, ...], says: str, tmp_path: Path) -> None:
    (path := tmp_path / "plain.txt").write_text(source)
    assert re.search(says, edge_here("run", MODEL, "-p", "x", "--chat-template", str(path), *more).stderr)


def test_ctrl_c_ends_cleanly_with_report() -> None:
    command = [sys.executable, "-m", "edge", "run", MODEL, "-p", "Count.", "-n", "-1", "--ignore-eos"]
    # A process started in the background may inherit an ignored SIGINT; a terminal's child does not.
    restore = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", restore, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        child.stdout.read(20)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=240)
    assert (child.returncode, "stopped: interrupted" in err) == (130, True)
    assert "Traceback" not in err


def test_sigterm_ends_answer_as_budget_does(tmp_path: Path) -> None:
    arguments = ["run", MODEL, "-n", "-1", "--ignore-eos", "--max-kv-size", "512", "--prompt-cache", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "edge", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        child.stdin.write("Count from one to one thousand in Chinese, 一二三.".encode())
        child.stdin.close()
        shown = child.stdout.read(20)
        child.send_signal(signal.SIGTERM)
        rest, err = child.stdout.read(), child.stderr.read() if child.stderr else b""
        assert child.wait(timeout=240) == 143
    assert b"Traceback" not in err
    assert (shown + rest).decode()  # whole characters
    assert b"stopped: terminated" in err
    assert any(tmp_path.rglob("*")), "the prompt is in the cache"


def test_sigterm_ends_a_waiting_chat(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "edge", "chat", MODEL, "-n", "5", "--json"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        child.stdin.write("Hello\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["stop_reason"] == "length"
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=240)
    assert (child.returncode, err) == (143, "")


def test_chat_remembers_and_reports_line_of_json_turn() -> None:
    flags = ("chat", TINY, "--backend", "reference", "-n", "12", "--json")
    done = edge(*flags, stdin="My name is Ada.\n\n/reset\nHello\nAgain\n")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["tokens"]["generated"] > 0 for report in reports] == [True, True, True]
    first, second, third = (report["kv"]["rows"] for report in reports)
    assert second < first + 30  # /reset emptied the cache
    assert third > second  # and the last turn was added to the one before


def test_chat_says_why_budget_ended_answer() -> None:
    flags = ("chat", TINY, "--backend", "reference", "-n", "3")
    done = edge(*flags, "--energy", "0.001mJ", stdin="hi\nhello\n")
    assert done.returncode == 3
    said = r"stopped in the prompt \(\d+ of \d+ tokens\): no answer; --energy 0\.001 mJ is spent"  # sensors have steps
    assert re.search(said, done.stderr)
    assert "stopped" not in edge(*flags, stdin="hi\n").stderr


def test_chat_pins_system_prompt_and_reports_evictions(tmp_path: Path) -> None:
    """One conversation on a tiny model: rows that go, an answer that is cut, commands, and what is no command."""
    saved = tmp_path / "talk.json"
    flags = ["--backend", "reference", "--system", "Be brief.", "--max-kv-size", "80", "-n", "40"]
    typed = (
        f'Hello\n/set temp\n/set temp 0.7\n/set seed 3\n"""two\n/lines"""\n/nope\n//slash\n/save {saved}\n'
        f"/context\n/undo\n/context\n/load {saved}\n/context\n/bye\nnever"
    )
    done = edge("chat", TINY, *flags, stdin=f"{typed}\n")
    assert done.returncode == 0
    for said in (
        r"\(the oldest \d+ rows of the conversation were evicted\)",
        r"\(the answer was cut after 40 tokens \(-n\): /set max-tokens N allows more\)",
        r"edge: /set temp takes a number, not ''",
        r"\(temp 0\.7, top-k 40, .* seed 3, max-tokens 40, stop none\)",
        r"edge: there is no command /nope: /help lists them, // sends a text that begins with a slash",
    ):
        assert re.search(said, done.stderr), done.stderr
    (before, after, loaded) = re.findall(r"(\d+) of 80 KV rows are used; (\d+) were evicted", done.stderr)
    assert "0" not in before
    assert after == loaded == ("0", "0")
    messages = json.loads(saved.read_text("utf-8"))["messages"]
    assert [each["content"] for each in messages if each["role"] == "user"] == ["Hello", "two\n/lines", "/slash"]

    flags = ["--backend", "reference", "--system", "Be brief.", "--max-kv-size", "50"]
    done = edge("chat", TINY, *flags, stdin="Hello\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--keep 24 needs at least 56 KV rows: raise --max-kv-size 50 or lower --keep" in done.stderr
    assert edge("chat", TINY, *flags, "--keep", "0", "-n", "2", stdin="Hello\n").returncode == 0


def test_chat_reads_files_and_resumes_conversation(tmp_path: Path) -> None:
    (tmp_path / "a letter.txt").write_text("Dear all\n", "utf-8")
    (tmp_path / "list.txt").write_text("1\n2\n", "utf-8")
    first, second = tmp_path / "first one.json", tmp_path / "second.json"
    flags = ["--backend", "reference", "-n", "2"]
    commands = [f'/read "{tmp_path}/a letter.txt"', "Who?", '/system "Be \\"brief\\"."', "/system",
                f'/save "{first}"']  # fmt: skip
    done = edge("chat", TINY, *flags, "-f", str(tmp_path / "list.txt"), stdin="\n".join(commands))
    assert done.returncode == 0
    assert "(a letter.txt: 9 characters, which go before the next question)" in done.stderr
    messages = json.loads(first.read_text("utf-8"))["messages"]
    assert [each["content"] for each in messages[:2]] == ['Be "brief".', "1\n2\n\nDear all\n\nWho?"]

    commands = ["Go on", "/read nope.txt", "/system", '/system "Yes" or "no"', f"/save {second}"]
    done = edge("chat", TINY, *flags, "--load", str(first), stdin="\n".join(commands))
    assert "edge: nope.txt: no such file" in done.stderr
    assert '(system prompt: Be "brief".' in done.stderr
    found = json.loads(second.read_text("utf-8"))["messages"]
    assert found[1:4] == [*messages[1:], {"role": "user", "content": "Go on"}]
    assert found[0]["content"] == '"Yes" or "no"'
    done = edge("chat", TINY, *flags, "--load", str(tmp_path / "none.json"), stdin="Hi\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none.json: no such file" in done.stderr
    assert "list.txt: no such file" in edge("chat", "no-such-model", "-f", "list.txt").stderr


def test_run_keeps_first_rows_that_keep_names() -> None:
    flags = ("run", TINY, "-p", "word " * 60, "-n", "4", "--raw", "--backend", "reference", "--kv-policy", "window")
    kept = json_here(*flags, "--max-kv-size", "64", "--keep", "20", "--ignore-eos", "--json")
    assert (kept["plan"]["config"]["pinned"], kept["kv"]["evicted"] > 0) == (20, True)


def test_bench_writes_each_format() -> None:
    flags = ["bench", TINY, "-p", "16", "-n", "4", "-d", "0,32", "-r", "2"]
    rows = json_here(*flags, "-o", "json")
    assert [row["test"] for row in rows] == ["pp16", "tg4", "pp16 @ d32", "tg4 @ d32"]
    assert all(row["tok/s"] > 0 and row["backend"] == "cpu" and row["threads"] > 0 for row in rows)
    assert set(rows[0]) == {"model", "size", "params", "backend", "threads", "test", "tok/s", "sd", "team", "team_why"}
    assert all(sum(row["team"]) >= 2 and len(row["team"]) == row["threads"] for row in rows)
    lines = edge_here(*flags, "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["test"] for line in lines] == [row["test"] for row in rows]
    table = list(csv.DictReader(io.StringIO(edge_here(*flags, "-o", "csv").stdout)))
    assert [row["test"] for row in table] == [row["test"] for row in rows]
    markdown = edge_here(*flags).stdout.splitlines()
    assert re.sub(r"\s+", " ", markdown[0]) == "| model | size | params | backend | threads | test | tok/s |"
    assert "±" in markdown[2]


def test_devices_and_version_are_shown() -> None:
    found = json_here("devices", "--json")
    host = found["host"]
    assert host["usable_cores"] >= 1
    assert host["memory"] > 0
    shown = edge_here("devices").stdout
    assert "memory limit" in shown
    for gpu in found["gpus"]:
        assert gpu["place"] in shown
        assert gpu["name"] in shown
    assert (found["no_gpu"] is None) == any(gpu["chosen"] for gpu in found["gpus"])
    assert found["no_gpu"] is None or found["no_gpu"] in shown
    assert re.fullmatch(r"edge \d+\.\d+\.\d+\n", edge_here("--version").stdout)


def test_missing_extra_names_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge.backends import find_backend, llamacpp
    from edge.errors import MissingExtraError
    from edge.model.model import open_model
    from edge.model.names.catalog import find_model

    opened = open_model(MODEL)
    monkeypatch.setattr(llamacpp, "is_installed", lambda: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'edge-runtime\[llamacpp\]'"):
        find_backend("llamacpp", opened.file, opened.spec)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'edge-runtime\[demo\]'"):
        find_model(MODEL)


def test_base_model_continues_texts(tmp_path: Path) -> None:
    said, model = "has no chat template: it continues texts", str(write_small(tmp_path / "base.gguf", Small()))
    flags = ("run", model, "-p", "abc", "-n", "1", "--backend", "reference")
    assert said in edge_here(*flags).stderr
    assert said not in edge_here(*flags, "--raw").stderr
    assert "no chat template: a base model" in edge_here("inspect", model).stdout


def test_time_ends_first_run(tmp_path: Path) -> None:
    ended = edge("run", TINY, "-p", "Hi", "--backend", "cpu", "--time", "0.1s", EDGE_CACHE=str(tmp_path))
    assert ended.returncode == 3
    assert re.fullmatch(r"(.*\n)*edge: no answer: --time .*was over .*\n", ended.stderr)
    assert not list(tmp_path.glob("kernels/*.img"))
