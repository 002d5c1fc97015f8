"""Own documents, on 50 questions of our own about Debian's handbook: recall, answers, pruning, a large index.

    python benchmarks/documents.py                      # recall@5 by words, by vectors, by both
    python benchmarks/documents.py --answers smollm2-135m gemma3-270m   # with and without passages
    python benchmarks/documents.py --many               # an index of 10,000 passages, of several languages
    python benchmarks/documents.py --llamaindex         # LlamaIndex with the same encoder, if it can be imported

The handbook is Debian's package, fetched with apt-get, without installing it. A passage answers a question if a pattern
is in it, and an answer is right if another is (handbook_questions.py). A peer's figures need its package beside edge's:
python -m venv, a .pth file with this environment's packages, pip install llama-index-core.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from handbook_questions import HELD_OUT, QUESTIONS
from machine import files_folder

import edge
from edge.devices.power import find_meter

TOP = 5
LANGUAGES = ("en-US", "fr-FR", "de-DE", "es-ES", "it-IT", "pt-BR", "nb-NO", "nl-NL", "pl-PL")
NAME, MANY = "handbook", "handbooks"


def handbook() -> Path:
    """The folder with a folder of HTML for each language."""
    folder = files_folder() / "debian-handbook"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as work:
            subprocess.run(["apt-get", "download", "-qq", "debian-handbook"], cwd=work, check=True, capture_output=True)
            [package] = Path(work).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, f"{folder}.partial"], check=True)
        Path(f"{folder}.partial").rename(folder)
    return folder / "usr" / "share" / "doc" / "debian-handbook" / "html"


def has(pattern: str, text: str) -> bool:
    return re.search(pattern, " ".join(text.split())) is not None


def recall(found: dict[str, list[str]]) -> list[str]:
    """Recall at 1 and at 5 of the texts that were found for each question."""
    return [
        f"{sum(any(has(evidence, text) for text in found[question][:at]) for question, evidence, _ in QUESTIONS)}"
        f"/{len(QUESTIONS)}"
        for at in (1, TOP)
    ]


def measure_recall() -> None:
    print("| search | recall@1 | recall@5 |\n|---|---:|---:|")
    for by in ("words", "vectors", "both"):
        with edge.Documents(NAME, by=by) as documents:  # type: ignore[arg-type]
            found = {each[0]: [one.passage.text for one in documents.search(each[0], TOP)] for each in QUESTIONS}
        print(f"| {by} | {' | '.join(recall(found))} |", flush=True)


def measure_answers(model: str, settings: list[dict[str, Any]], top: int) -> None:
    """Right answers without passages, and with them under each of the settings of `Documents`; CPU seconds and joules
    of a question, searching and ranking included."""
    meter = find_meter()
    print(f"| {model} | right | prompt tokens | CPU s | J |\n|---|---:|---:|---:|---:|")
    for setting in settings:
        right = tokens = 0
        with edge.Documents(NAME, top=top, **setting) as documents:
            documents.load()
            with edge.load(model, memory="1GiB", max_kv_size=4096) as session:
                began, spent = time.process_time(), meter.read().joules
                for question, _, pattern in QUESTIONS:
                    own = {"documents": documents} if setting else {}
                    said = session.generate(question, max_tokens=48, **own)
                    report = session.report
                    assert report is not None
                    right += has(pattern, said.lower())
                    tokens += report.tokens.prompt
        name = ", ".join(f"{key}={value}" for key, value in setting.items()) or "no passages"
        took, joules, count = time.process_time() - began, meter.read().joules - spent, len(QUESTIONS)
        print(f"| {name} | {right}/{count} | {tokens / count:.0f} | {took / count:.2f} | {joules / count:.2f} |",
              flush=True)  # fmt: skip


def measure_evidence(top: int) -> None:
    """The questions whose answer is still in the passages when sentences have left, without a model."""
    from edge.documents.pruning import prune_texts, ranked_by

    print("| ranked by | stays | tokens | answer there | tokens, held out | answer there | CPU s of both |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with edge.Documents(NAME, top=top) as documents, edge.load("smollm2-135m", max_kv_size=256) as reader:
        encode = reader.model.tokenizer.encode
        documents.load()
        ranker = documents._encoder()
        for by, keep in [("", 1.0), *((by, keep) for by in ("BM25", "encoder") for keep in (0.7, 0.5, 0.3))]:
            cells, began = list[str](), time.process_time()
            for questions in (QUESTIONS, HELD_OUT):
                there = tokens = 0
                for question, evidence, _ in questions:
                    texts = [each.passage.text for each in documents.search(question)]
                    score = ranked_by(ranker, question) if by == "encoder" else None
                    kept, pruned = prune_texts(texts, question, keep, lambda text: encode(text).size, score)
                    there += has(evidence, "\n".join(kept))
                    tokens += pruned.after
                cells += [f"{tokens / len(questions):.0f}", f"{there}/{len(questions)}"]
            took = (time.process_time() - began) / (len(QUESTIONS) + len(HELD_OUT))
            print(f"| {by} | {keep} | {' | '.join(cells)} | {took:.3f} |", flush=True)


def measure_many() -> None:
    folder = handbook()
    done = edge.index(MANY, *(folder / each for each in LANGUAGES), memory="256MiB")
    print(f"{done.passages:,} passages of {done.files} files: {done.seconds:.0f} s, {done.bytes / 2**20:.1f} MiB, "
          f"peak {done.peak / 2**20:.0f} MiB of 256 MiB")  # fmt: skip


def measure_llamaindex(folder: Path) -> None:
    """Its own reader of HTML, splitter and search, with edge's encoder."""
    from llama_index.core import Document, VectorStoreIndex
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.node_parser import SentenceSplitter

    from edge.documents.encoder import MINILM, open_encoder
    from edge.documents.reading import read_document
    from edge.options import Options

    session = edge.load(open_encoder(MINILM, Options()))

    class Encoder(BaseEmbedding):
        def _get_text_embedding(self, text: str) -> list[float]:
            return session.embed(text, truncate=True).tolist()

        def _get_query_embedding(self, query: str) -> list[float]:
            return self._get_text_embedding(query)

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_text_embedding(query)

    texts = [
        Document(text="\n\n".join(block.text for block in read_document(path.name, path.read_bytes()).blocks))
        for path in sorted(folder.glob("*.html"))
    ]
    with session:
        index = VectorStoreIndex.from_documents(
            texts, embed_model=Encoder(), transformations=[SentenceSplitter(chunk_size=400, chunk_overlap=40)]
        )
        retriever = index.as_retriever(similarity_top_k=TOP)
        found = {each[0]: [one.get_content() for one in retriever.retrieve(each[0])] for each in QUESTIONS}
    print(f"| LlamaIndex, vectors | {' | '.join(recall(found))} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", nargs="+", default=[])
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--prune", nargs="+", default=[])
    parser.add_argument("--evidence", action="store_true")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--llamaindex", action="store_true")
    chosen = parser.parse_args()
    os.environ.setdefault("EDGE_INDEXES", str(files_folder() / "indexes"))
    folder = handbook() / LANGUAGES[0]
    done = edge.index(NAME, folder, memory="512MiB")
    print(f"{done.passages:,} passages, {done.embedded:,} embedded in {done.seconds:.0f} s", file=sys.stderr)
    if chosen.many:
        measure_many()
    elif chosen.llamaindex:
        measure_llamaindex(folder)
    elif chosen.evidence:
        measure_evidence(chosen.top)
    elif chosen.answers:
        settings: list[dict[str, Any]] = [{"prune": each} for each in chosen.prune] or [{}, {"by": "both"}]
        for model in chosen.answers:
            measure_answers(model, settings, chosen.top)
    else:
        measure_recall()


if __name__ == "__main__":
    main()
