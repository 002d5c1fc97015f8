"""The JavaScript package in Chromium: downloads that break, damaged pieces, several sessions, cancelling, a page that
Vite built, and the same answers as edge's own."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from browser import Page, until
from bundles import model_of
from conftest import NEEDS_WASM
from lora_files import write_adapter
from test_web_types import complaints
from web_site import NAME, PIECE, ROWS, Sent, served, site_of

import edge
from edge.apps.bundle import MODEL
from edge.apps.manifest import MANIFEST, manifest_text, seal
from edge.apps.sections.adapter_file import export_adapter
from edge.sampling import SamplingParams

pytestmark = [pytest.mark.slow, NEEDS_WASM]

# Errors come back as {code, message}.
HEAD = """
  const { Edge } = await import(document.baseURI + 'edge/index.js');
  const steps = [];
  let pieces = 0;
  const onProgress = (each) => {
    steps.push(each);
    for (; each.step === 'download' && pieces < Math.floor(each.loaded / PIECE); pieces++) fetch('/loaded');
  };
  const options = { onProgress };
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    return site_of()


@pytest.fixture
def site(page: Page, folder: Path) -> Iterator[Sent]:
    """The page is at a new copy of the site, whose storage is empty."""
    with served(folder) as (url, sent):
        at(page, url)
        yield sent


def at(page: Page, url: str) -> None:
    """A page without scripts of its own, at a site's address."""
    page.visit(f"{url}edge/package.json")
    page.value(f"document.head.append(Object.assign(document.createElement('base'), {{href: {url!r}}}))")


def run(page: Page, script: str) -> Any:
    """What a script returns, or its error's code and message."""
    return page.value(
        f"(async () => {{ try {{ const PIECE = {PIECE}; {HEAD} {script} }} catch (error) "
        "{ return { code: error.code ?? error.name, message: error.message }; } })()"
    )


def visit(page: Page, folder: Path, script: str) -> Any:
    """What a script returns at a site."""
    with served(folder) as (url, _):
        at(page, url)
        return run(page, script)


# The engines' workers are `made`, and run `change` besides.
CHANGED = """
  const Real = globalThis.Worker, made = [];
  globalThis.Worker = class {
    constructor(url, options) {
      if (!String(url).endsWith('worker.js')) return new Real(url, options);
      const code = `import ${JSON.stringify(String(url))}; const tell = postMessage; ${change}`;
      made.push(new Real(URL.createObjectURL(new Blob([code], { type: 'text/javascript' })), options));
      return made.at(-1);
    }
  };
"""

# Engines that wait, once they have `go`, after each part of a prompt and each segment, until the page calls `proceed`.
_STEPPED = """
  let flag;
  addEventListener('message', ({ data: { go } }) => { flag ??= go; });
  globalThis.postMessage = (said, ...more) => {
    tell(said, ...more);
    const { prompt, text } = said.event ?? {};
    if (flag && (text || prompt?.done < prompt?.asked)) Atomics.wait(flag, 0, 0);
  };
"""
STEPPED = f"""
  const change = {_STEPPED!r}; {CHANGED}
  const go = new Int32Array(new SharedArrayBuffer(4));
  const proceed = () => (Atomics.store(go, 0, 1), Atomics.notify(go, 0));
"""


@lru_cache
def expected(prompt: str, count: int, name: str = NAME, **options: Any) -> str:
    chosen = {"backend": "cpu", "threads": 2, "max_kv_size": ROWS} | options
    with edge.load(model_of(name), **chosen) as session:
        greedy = SamplingParams(temperature=0)
        return "".join(session.stream(prompt, max_tokens=count, sampling=greedy, ignore_eos=True))


ASK = "await session.ask('abc', { temperature: 0, maxTokens: 24, ignoreEos: true })"


def test_answers_are_those_of_edge(page: Page, site: Sent, folder: Path) -> None:
    found = run(page, f"""
      const session = await Edge.open('./', options);
      const first = {ASK};
      const report = session.report;
      await session.rewind();
      return {{ first, again: {ASK}, report, info: session.info, steps, ids: [...await session.tokenize('abc')] }};
    """)  # fmt: skip
    assert found["first"] == found["again"] == expected("abc", 24)
    size = (folder / MODEL).stat().st_size
    assert found["steps"][-1] == {"step": "ready", "loaded": size, "total": size}
    assert [each["step"] for each in found["steps"][:-1]] == ["download"] * (len(found["steps"]) - 1)
    assert (site.bytes, len(site.spans)) == (size, 1)
    info, report = found["info"], found["report"]
    assert (info["isolated"], info["stored"], info["capacity"]) == (True, True, ROWS)
    assert info["threads"] >= 1
    assert report["finish"] == "length"
    assert report["tokens"] == 24
    assert report["promptTokens"] > len(found["ids"])  # the template's are among them
    assert report["memory"]["bytes"] <= report["memory"]["bound"] == info["bytes"]["bound"] <= 64 << 20
    assert report["measured"] is False


def test_second_visit_downloads_nothing(page: Page, site: Sent) -> None:
    found = run(page, """
      await (await Edge.open('./')).close();
      const stored = await Edge.stored('./');
      const session = await Edge.open('./', options);
      await session.close();
      await Edge.forget('./');
      const after = await session.ask('a').catch((error) => error.code);
      return { stored, steps, left: await Edge.stored('./'), after };
    """)  # fmt: skip
    assert site.bytes == found["stored"] == found["steps"][-1]["total"]
    assert {each["step"] for each in found["steps"]} == {"load", "ready"}
    assert (found["left"], found["after"]) == (0, "closed")


def test_broken_download_goes_on_where_it_stopped(page: Page, site: Sent, folder: Path) -> None:
    site.cut = [3 * PIECE + 100, 5]
    found = run(page, f"const session = await Edge.open('./', options); return {ASK};")
    assert found == expected("abc", 24)
    assert [span.start for span in site.spans] == [0, 3 * PIECE, 3 * PIECE]
    assert site.bytes == (folder / MODEL).stat().st_size + 105


def test_aborted_download_goes_on_at_the_next_visit(page: Page, site: Sent) -> None:
    site.cut = [2 * PIECE]
    found = run(page, """
      const abort = new AbortController();
      const first = await Edge.open('./', {
        onProgress: ({ loaded }) => loaded >= PIECE && abort.abort(), signal: abort.signal,
      }).catch((error) => error.name);
      await (await Edge.open('./', options)).close();
      return { first, step: steps[0].step };
    """)  # fmt: skip
    assert found == {"first": "AbortError", "step": "load"}


def test_damaged_pieces_are_fetched_again_and_those_that_stay_are_an_error(page: Page, site: Sent) -> None:
    site.flip = [PIECE] * 9
    found = run(page, "await Edge.open('./');")
    assert found["code"] == "bad-file"
    assert f"is damaged at byte {PIECE}: upload the site again" in found["message"]
    site.flip, site.spans = [PIECE + 7, PIECE + 8], []
    found = run(page, f"await Edge.forget('./'); const session = await Edge.open('./'); return {ASK};")
    assert found == expected("abc", 24)
    assert [span.start for span in site.spans[:2]] == [0, PIECE]


def test_damage_in_storage_is_repaired(page: Page, site: Sent) -> None:
    found = run(page, f"""
      await (await Edge.open('./')).close();
      const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle('edge');
      for await (const [name, file] of folder) {{
        const stream = await file.createWritable({{ keepExistingData: true }});
        await stream.write({{ type: 'write', position: {2 * PIECE + 9}, data: new Uint8Array([1, 2, 3, 4]) }});
        await stream.close();
      }}
      const session = await Edge.open('./', options);
      return {ASK};
    """)  # fmt: skip
    assert found == expected("abc", 24)
    assert site.spans[1:] == [range(2 * PIECE, 3 * PIECE)]


def test_two_sessions_download_once(page: Page, site: Sent) -> None:
    found = run(page, f"""
      const sessions = await Promise.all([Edge.open('./'), Edge.open('./')]);
      return Promise.all(sessions.map(async (session) => {ASK}));
    """)  # fmt: skip
    assert found == [expected("abc", 24)] * 2
    assert site.bytes == found_size(site)


def found_size(sent: Sent) -> int:
    return max(span.stop for span in sent.spans)


def test_adapters_are_set_by_address_or_bytes(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site_of(NAME, "simd", gpu=True, lora_rank=8), folder)  # which other tests have, too
    lora = write_adapter(tmp_path / "a.gguf", model_of(NAME), 8)
    export_adapter(model_of(NAME), lora, folder, folder / "style.edge")
    found = visit(page, folder, f"""
      const session = await Edge.open('./');
      const answers = [];
      const bytes = new Uint8Array(await (await fetch(document.baseURI + 'style.edge')).arrayBuffer());
      for (const each of ['style.edge', null, bytes]) {{
        await session.setAdapter(each);
        answers.push({ASK});
      }}
      const code = (error) => error.code;
      return {{
        answers, rank: session.info.loraRank,
        errors: [
          await session.setAdapter('none.edge').catch(code), await session.setAdapter('model.edge').catch(code),
          await session.setAdapter(bytes, {{ scale: NaN }}).catch(code),
        ],
      }};
    """)  # fmt: skip
    styled = expected("abc", 24, lora=str(lora))
    assert found["answers"] == [styled, expected("abc", 24), styled]
    assert found["answers"][0] != found["answers"][1]
    assert (found["rank"], found["errors"]) == (16, ["network", "bad-file", "bad-argument"])


@pytest.mark.parametrize("isolated", [True, False])
def test_answers_can_be_cancelled(page: Page, folder: Path, isolated: bool) -> None:
    """Pages that are not isolated have one thread."""
    with served(folder, isolated=isolated) as (url, _):
        at(page, url)
        found = run(page, f"""
          const endless = {{ maxTokens: 100000, ignoreEos: true }};
          const session = await Edge.open('./');
          const finishes = [];
          let count = 0;
          for await (const piece of session.stream('abc', endless)) if (++count === 5) break;
          finishes.push(session.report.finish);
          const abort = new AbortController();
          const busy = [];
          for await (const piece of session.stream('abc', {{ ...endless, signal: abort.signal }})) {{
            if (!busy.length) busy.push(await session.rewind().catch((error) => error.code));
            abort.abort();
          }}
          finishes.push(session.report.finish);
          for await (const piece of session.stream('abc', {{ ...endless, signal: AbortSignal.abort() }})) count++;
          finishes.push(session.report.finish);
          await session.rewind();
          return {{ finishes, busy, info: session.info, answer: {ASK} }};
        """)  # fmt: skip
    assert (found["finishes"], found["busy"]) == (["interrupted"] * 3, ["busy"])
    assert found["info"]["isolated"] == isolated
    assert isolated or found["info"]["threads"] == 1
    assert found["answer"] == expected("abc", 24)


def test_question_cancelled_in_its_prompt_is_taken_back(page: Page, site: Sent) -> None:
    found = run(page, f"""
      {STEPPED}
      const session = await Edge.open('./');
      const greedy = {{ temperature: 0, maxTokens: 8, ignoreEos: true }};
      await session.ask('abc', greedy);
      const state = await session.save();
      const next = await session.ask('def', greedy);
      await session.load(state);
      const abort = new AbortController();
      const told = [];
      made[0].postMessage({{ go }});
      const onPrompt = (done, asked) => {{
        told.push(done < asked);
        abort.abort();
        proceed();
      }};
      const answer = await session.ask('word '.repeat(9), {{ ...greedy, signal: abort.signal, onPrompt }});
      const {{ finish }} = session.report;
      const refused = await session.load(new Uint8Array(9)).catch((error) => error.code);
      return {{ told, answer, finish, refused, next, again: await session.ask('def', greedy) }};
    """)  # fmt: skip
    assert found["told"][0] is True
    assert (found["answer"], found["finish"], found["refused"]) == ("", "interrupted", "bad-file")
    assert found["again"] == found["next"]


@pytest.mark.parametrize(("folder_name", "options", "code", "words"), [
    ("./", "{ memory: '1MiB' }", "no-memory", "MiB, memory is 1 MiB"),
    ("./", "{ memory: 'much' }", "bad-argument", 'memory much: give bytes, or a text such as "256MiB"'),
    ("./", "{ isa: 'sse9' }", "bad-argument", "isa sse9: choose relaxed"),
    ("./edge/", "{}", "network", "the server says 404"),
])  # fmt: skip
def test_wrong_options_and_folders_are_errors(
    page: Page, site: Sent, folder_name: str, options: str, code: str, words: str
) -> None:
    found = run(page, f"await Edge.open('{folder_name}', {options});")
    assert found["code"] == code
    assert words in found["message"]


def test_sites_of_one_host_keep_their_models(page: Page, folder: Path, tmp_path: Path) -> None:
    """A site's new model replaces its old one."""
    both = tmp_path / "site"
    for each in (both, both / "other"):
        shutil.copytree(folder, each)
    rename_model(both / "other", "0")
    with served(both) as (url, sent):
        at(page, url)
        sizes = "await Promise.all(['./', './other/'].map((each) => Edge.stored(each)))"
        opened = f"await (await Edge.open('./other/')).close(); return {sizes};"
        assert run(page, f"await (await Edge.open('./')).close(); {opened}") == [found_size(sent)] * 2
        rename_model(both / "other", "1")
        assert run(page, opened) == [found_size(sent)] * 2
        names = run(page, """
          const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle('edge');
          return Array.fromAsync(folder.keys());
        """)  # fmt: skip
    assert sorted(name.endswith("-" + 64 * "1") for name in names) == [False, True]


def rename_model(folder: Path, digit: str) -> None:
    """The manifest says that the model's hash is another one."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][MODEL]["sha256"] = 64 * digit
    (folder / MANIFEST).write_text(manifest_text(seal(manifest)))


def test_addresses_without_https_are_an_error(page: Page, folder: Path) -> None:
    """0.0.0.0 is this machine, but for a browser no secure address, as those of other machines."""
    with served(folder) as (url, _):
        at(page, url.replace("127.0.0.1", "0.0.0.0"))
        found = run(page, "await Edge.open('./');")
        stored = run(page, "await Edge.stored('./');")
    message = "browsers check and store a model on secure pages only: use https, or localhost"
    assert found == stored == {"code": "unsupported", "message": message}


# In a project that npm and Vite know nothing else of

ROOT = Path(__file__).parents[2]
VITE = ROOT / "build" / "vite" / "node_modules" / ".bin" / "vite"
# Where an exported site is a folder of a page: in Vite's `public`, whose files are copied as they are.
COPIED = ("manifest.json", "model.edge", "edge/*.wasm")
PAGE = {
    "package.json": '{ "name": "page", "private": true, "type": "module" }',
    "index.html": '<p id="answer"></p><script type="module" src="/main.ts"></script>',
    "main.ts": """import { Edge, type Report } from "edge-web";

const session = await Edge.open("./");
const answer: string = await session.ask("abc", { temperature: 0, maxTokens: 24, ignoreEos: true });
const report: Report | null = session.report;
document.querySelector("#answer")!.textContent = `${report?.finish} ${session.info.isolated} ${answer}`;
""",
}


@pytest.mark.skipif(not VITE.exists() and os.environ.get("CI") != "true", reason="no Vite: make test installs it")
def test_page_built_by_vite_answers_as_edge(page: Page, folder: Path, tmp_path: Path) -> None:
    """The package is as `make dist` packs it."""
    for name, text in PAGE.items():
        (tmp_path / name).write_text(text)
    dist = runpy.run_path(str(ROOT / "docs" / "dist.py"))
    tarball = dist["npm_tarball"](tmp_path, dist["project_version"]())
    install = ["npm", "install", "--offline", "--silent", "--no-audit", "--no-fund", str(tarball)]
    subprocess.run(install, cwd=tmp_path, check=True)
    required = ["node", "-p", "typeof require('edge-web').Edge.open"]  # by CommonJS
    assert subprocess.run(required, cwd=tmp_path, capture_output=True, text=True).stdout == "function\n"
    for path in (path for pattern in COPIED for path in folder.glob(pattern)):
        to = tmp_path / "public" / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)

    assert complaints(tmp_path, "main.ts") == ""
    built = subprocess.run([VITE, "build", "--logLevel", "warn"], cwd=tmp_path, capture_output=True, text=True)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    with served(tmp_path / "dist") as (url, sent):
        page.visit(url)
        until(page, "document.querySelector('#answer').textContent")
        assert page.value("document.querySelector('#answer').textContent") == f"length true {expected('abc', 24)}"
        assert not [path for path in sent.paths if path.startswith("/edge/") and not path.endswith(".wasm")]
