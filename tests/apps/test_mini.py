"""edge-mini: a bundle's program, which answers without Python, beside edge itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from bundles import bundle_of
from conftest import GOLDEN
from test_cli import REPORT_KEYS
from test_power import write

from edge import export, load
from edge.apps.mini import PROGRAM
from edge.budget import parse_bytes, parse_celsius, parse_joules, parse_seconds, parse_watts
from edge.cli.groups import AnswerOptions, Output, PromptOptions
from edge.errors import InputError
from edge.flags import flags_of
from edge.lab.report.run import report_line
from edge.options import Options
from edge.sampling import SamplingParams

NAME, MODEL = "llama-gqa-tied", "model.edge"
ON = ("--ignore-eos", "-n", "-1")  # and on


def mini(*words: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [f"./{PROGRAM}", *words]
    return subprocess.run(
        command, cwd=bundle_of(NAME), input=stdin, capture_output=True, text=True, env=os.environ | variables,
        timeout=600,
    )  # fmt: skip


def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return mini("run", MODEL, *words, **more)


def shape(line: str) -> str:
    """A report without its numbers and units."""
    return re.sub(r"[\d.,]+ ?(tok/s|tokens|s\b|[KM]?i?B|m?J)", "#", line)


def test_answers_and_reports_as_edge_does() -> None:
    with load(GOLDEN / f"{NAME}.gguf", backend="cpu") as session:
        answer = session.generate("Hi", max_tokens=12, system="Be brief.", time_limit=60, energy_limit=30)
        report = session.report
        second = session.generate("Bye", max_tokens=12, follow_up=True)
    assert report is not None
    words = ("-n", "12", "--system", "Be brief.", "--energy", "30J", "--memory", "64MiB")
    said = run("-p", "Hi", *words)
    assert (said.returncode, said.stdout) == (0, answer + "\n")
    (line,) = report_line(report)
    wanted = re.sub(r" · first run:[^·]*(?= ·)| · -v: more| \+ [^·]*for the start,", "", line)
    assert shape(said.stderr.strip()) == shape(re.sub(r"(peak [^·]*?) ·", r"\1 of 64 MiB ·", wanted))
    found = json.loads(run("-", *words, "--json", "--time", "60s", stdin="Hi").stdout)
    for key, value in found.items():
        assert REPORT_KEYS[key] is None or value.keys() <= REPORT_KEYS[key]
    assert found["text"] == answer
    assert found["tokens"] == {"prompt": report.tokens.prompt, "generated": report.tokens.generated}
    assert (found["kv"]["rows"], found["kv"]["capacity"]) == (report.kv.rows, report.kv.capacity)
    assert (found["stop_reason"], found["timings"]["budget_s"]) == (report.stop_reason, 60)
    assert found["memory"]["weights"] < found["memory"]["budget"] == 64 << 20
    both = mini("chat", MODEL, "-n", "12", "--system", "Be brief.", stdin="Hi\n\nBye")
    assert (both.returncode, both.stdout) == (0, f"{answer}\n{second}\n")
    assert both.stderr.count("stopped: ") == 2


@pytest.mark.parametrize(("limit", "reason"), [(("--energy", "3J"), "energy"), (("--time", "0.2s"), "time")])
def test_budgets_end_answers(limit: tuple[str, str], reason: str, tmp_path: Path) -> None:
    """By the estimate, which counts a token's time: on a loaded machine one may cost a part of a joule."""
    found = json.loads(run("Hi", *ON, *limit, "--json", EDGE_SENSORS=str(tmp_path)).stdout)
    assert found["stop_reason"] == reason
    spent, most = found["energy"]["joules"], found["energy"]["budget"]
    assert most is None or 0.5 * most < spent < 2 * most


@pytest.mark.parametrize(
    ("limit", "says"), [(("--energy", "0.001mJ"), "energy is spent"), (("--time", "0.001ms"), "time is over")]
)
def test_budgets_that_leave_no_token_are_refused_in_one_line(limit: tuple[str, str], says: str, tmp_path: Path) -> None:
    for more, blank in (((), True), (("--json",), False)):
        done = run("Hi", *limit, *more, EDGE_SENSORS=str(tmp_path))
        assert (done.returncode, done.stdout == "", done.stderr.count("\n")) == (3, blank, 1)
        assert done.stderr.startswith(f"edge-mini: stopped before the first token of the answer: --{says}")
    assert json.loads(done.stdout)["tokens"]["generated"] == 0
    chat = mini("chat", MODEL, *limit, stdin="Hi", EDGE_SENSORS=str(tmp_path))
    assert (chat.returncode, chat.stdout, chat.stderr.count("\n")) == (0, "", 1)
    assert f"stopped before the first token of the answer: --{says}" in chat.stderr


def write_rail(root: Path) -> None:
    """An input rail of 5 V and 2 A."""
    for name, value in {"name": "ina3221", "in1_label": "VDD_IN", "in1_input": "5000", "curr1_input": "2000"}.items():
        write(root, f"sys/class/hwmon/hwmon0/{name}", value + "\n")


def test_joules_are_read_where_the_board_counts_them(tmp_path: Path) -> None:
    write_rail(tmp_path)
    found = json.loads(run("Hi", *ON, "--energy", "3J", "--json", EDGE_SENSORS=str(tmp_path)).stdout)
    assert (found["stop_reason"], found["energy"]["source"], found["energy"]["kind"]) == (
        "energy", "INA3221", "integrated",
    )  # fmt: skip
    assert found["energy"]["joules"] == pytest.approx(10 * found["timings"]["total_s"], rel=0.5)


def write_zone(root: Path, celsius: int) -> None:
    for name, value in {"type": "cpu-thermal", "temp": f"{celsius}000"}.items():
        write(root, f"sys/class/thermal/thermal_zone0/{name}", value + "\n")


def test_hot_boards_pause(tmp_path: Path) -> None:
    limit = ("Hi", *ON, "--time", "1s", "--max-temp", "70C", "--json")
    refused = run(*limit, EDGE_SENSORS=str(tmp_path))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--max-temp cannot be kept: this device shows no temperature" in refused.stderr
    write_zone(tmp_path, 90)
    before = os.times()
    found = json.loads(run(*limit, EDGE_SENSORS=str(tmp_path)).stdout)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert found["stop_reason"] == "time"
    assert spent < 0.5 * found["timings"]["total_s"]


def test_boards_that_become_hot_pause_while_joules_are_read(tmp_path: Path) -> None:
    """Temperatures are read more seldom than joules. Pauses leave a few hundredths of the time."""
    write_rail(tmp_path)
    write_zone(tmp_path, 40)
    said = tmp_path / "answer"
    command = [f"./{PROGRAM}", "run", MODEL, "Hi", *ON, "--time", "100s", "--max-temp", "70C", "-q"]
    environment = os.environ | {"EDGE_SENSORS": str(tmp_path)}
    with said.open("wb") as out, subprocess.Popen(command, cwd=bundle_of(NAME), stdout=out, env=environment) as process:
        while not said.stat().st_size:
            assert process.poll() is None
            time.sleep(0.005)
        write_zone(tmp_path, 90)
        end, worked = time.monotonic() + 60, 0.5
        while worked > 0.1:  # seconds of CPU time, in half a second
            assert time.monotonic() < end
            before = sum(psutil.Process(process.pid).cpu_times()[:2])
            time.sleep(0.5)
            worked = sum(psutil.Process(process.pid).cpu_times()[:2]) - before
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def test_interrupts_end_answers_with_their_report() -> None:
    command = [f"./{PROGRAM}", "run", MODEL, "Hi", *ON]
    with subprocess.Popen(command, cwd=bundle_of(NAME), stdin=-3, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=600)
    assert process.returncode == 130
    assert told.decode().endswith("stopped: interrupted\n")


AMOUNTS: dict[str, tuple[Any, ...]] = {  # parsers, and where reports have the amount
    "--memory": (parse_bytes, "memory", "budget"), "--time": (parse_seconds, "timings", "budget_s"),
    "--energy": (parse_joules, "energy", "budget"), "--power": (parse_watts,),
    "--max-temp": (partial(parse_celsius, what="max-temp"),),
}  # fmt: skip
TEXTS = (
    "5", "x", "0J", "0 s", "-3s", "1e4s", "", "1..5J", ".W", "5 J J", "5q", "100", "70 KiB", " .5Wh ", "2MJ", "2mj",
    "1m", "70 °C",
)  # fmt: skip
SAMPLING = {
    "temperature": "-1", "top_k": "-1", "top_p": "1.5", "min_p": "-0.1", "seed": "-1", "presence_penalty": "3.0",
    "dry_allowed_length": "0", "xtc_threshold": "2.0",
}  # fmt: skip
WRONG = [
    ((), "begin with run or chat: edge-mini --help"),
    (("walk", MODEL), "begin with run or chat: edge-mini --help"),
    (("run",), "no model: give the model.edge that was exported with this program"),
    (("run", "none.edge", "Hi"), "none.edge"),
    (("run", MODEL), "stdin is empty: give a prompt after MODEL, with -p, or on stdin"),
    (("run", MODEL, "Hi", "-p", "Hi"), "give the prompt once: with -p, or after MODEL"),
    (("chat", MODEL, "Hi"), "edge-mini chat takes no prompt: its turns are the lines of stdin"),
    (("run", MODEL, "Hi", "--bogus", "3"), "No such option: --bogus (see edge-mini --help)"),
    (("run", MODEL, "Hi", "-n"), "-n needs a value: edge-mini --help"),
    (("run", MODEL, "Hi", "--seed", "18446744073709551616"), "--seed must be from 0 to 18446744073709551615, not"),
    (("run", MODEL, "Hi", "--temp", "nan"), "--temp must be from 0 to 100, not nan"),
    (("run", MODEL, "Hi", "--temp=a\nb"), "--temp must be a number, not 'a b'"),
    (("run", MODEL, "Hi", "--top-k", "1.5"), "--top-k must be a whole number, not '1.5'"),
    (("run", MODEL, "Hi", "--speculate", "on"), "--speculate must be auto or off, not 'on'"),
    *((("run", MODEL, "Hi", "-n", each), "--max-tokens must be a whole number, at least 1, or -1 for no limit, not ")
      for each in ("0", "x", "-2", "4294967296")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_wrong_input_ends_in_one_line(words: tuple[str, ...], says: str) -> None:
    done = mini(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("edge-mini: ")
    assert says in done.stderr


def parsed(parse: Callable[[str], float], text: str) -> float | str:
    """The amount, or what edge says of it."""
    try:
        return parse(text)
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("flag", AMOUNTS)
def test_amounts_mean_what_they_mean_to_edge(flag: str, tmp_path: Path) -> None:
    parse, *place = AMOUNTS[flag]
    write_zone(tmp_path, 40)
    for text in TEXTS:
        done = run("Hi", "-n", "1", flag, text, "--json", EDGE_SENSORS=str(tmp_path))
        wanted = parsed(parse, text)
        if isinstance(wanted, str):
            assert (done.returncode, done.stderr) == (2, f"edge-mini: {wanted}\n"), text
            continue
        if done.returncode == 3 and not done.stdout:
            assert "the memory budget is" in done.stderr
        elif place:
            part, name = place
            assert json.loads(done.stdout)[part][name] == pytest.approx(wanted), text


def test_options_are_those_of_edge_run() -> None:
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)", mini("--help").stdout, re.M)
    groups = (Options, SamplingParams, AnswerOptions, PromptOptions, Output)
    theirs = {name for group in groups for flag in flags_of(group).values() for name in flag.names}
    assert {"--temp", "--top-k", "--xtc-threshold", "--max-temp", "--power", "--memory", "--json", "--raw"} <= {*flags}
    assert [each for each in flags if each not in theirs] == []
    for name, value in SAMPLING.items():
        with pytest.raises(InputError) as error:
            SamplingParams(**{name: float(value) if "." in value else int(value)})
        flag = str(error.value).split()[0]
        assert run("Hi", flag.replace("temperature", "--temp"), value).stderr == f"edge-mini: {error.value}\n"


def test_memory_is_refused_before_anything_runs() -> None:
    peak = json.loads((bundle_of(NAME) / "manifest.json").read_text())["plan"]["peak"]
    done = run("Hi", "--memory", str(peak - 1))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert re.search(r" needs \d+ MiB, the memory budget is [\d.]+ MiB: export it with that --memory", done.stderr)
    done = run("Hi", "-n", "1", "--memory", str(peak))
    assert (done.returncode, done.stderr.startswith("\n1 token · first after ")) == (0, True)
    with open("/dev/full", "w") as full:
        command = [bundle_of(NAME) / PROGRAM, "run", bundle_of(NAME) / MODEL, "Hi", "-n", "2"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (74, "edge-mini: stdout cannot be written: No space left on device\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"kv_policy": "streaming"}, {"kv_policy": "h2o", "kv_dtype": "int8"}])
def test_arm64_program_answers_under_qemu(options: dict[str, str], tmp_path: Path) -> None:
    """On CPUs without and with dot products, token by token as the session here; with evictions."""
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no qemu-aarch64-static")
    folder, rows = tmp_path / "board", {"max_kv_size": 256, "prefill_step_size": 32, "threads": 2}
    export(GOLDEN / f"{NAME}.gguf", folder, device="raspberry-pi-5", isas=["dotprod", "neon"], **rows, **options)
    with load(GOLDEN / f"{NAME}.gguf", backend="cpu", **rows, **options) as session:
        answer = session.generate("Write a story about a fox.", max_tokens=300, ignore_eos=True)
    for cpu in ("cortex-a53", "cortex-a76"):
        command = ["qemu-aarch64-static", "-cpu", cpu, folder / PROGRAM, "run", folder / MODEL]
        words = ["Write a story about a fox.", "-n", "300", "--ignore-eos"]
        assert subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout == answer + "\n"
    assert b"NEEDED" not in subprocess.run(["readelf", "-d", folder / PROGRAM], capture_output=True, check=True).stdout
