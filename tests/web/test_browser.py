"""The browser of the tests: what is said of a page is said by it."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from browser import complaints, until
from conftest import chromium

ASKING = b"<script>setInterval(() => fetch('/more').catch(() => 0), 1)</script>"


class _Asking(BaseHTTPRequestHandler):
    """A page that goes on asking, also once nobody answers."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(ASKING)

    def log_message(self, *_: object) -> None:
        pass


def test_errors_of_an_earlier_page_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "quiet.html").write_text("<p>quiet")
    with chromium(tmp_path / "browser") as page:
        with ThreadingHTTPServer(("127.0.0.1", 0), _Asking) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            page.visit(f"http://127.0.0.1:{server.server_port}/")
            server.shutdown()
            thread.join()
        while not complaints(page):  # nobody answers any more
            page.value("1")
        time.sleep(0.1)  # more of them wait to be read
        page.visit((tmp_path / "quiet.html").as_uri())
        assert complaints(page) == []


class _Reloading(BaseHTTPRequestHandler):
    """/again: a page that loads itself nine times more. /always: as long as it is there. /late: one that takes a
    while."""

    def do_GET(self) -> None:
        if self.path not in ANSWERS:  # an icon
            return self.send_error(404)
        if self.path == "/script.js":
            time.sleep(0.5)
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript" if self.path == "/script.js" else "text/html")
        self.end_headers()
        self.wfile.write(ANSWERS[self.path])

    def log_message(self, *_: object) -> None:
        pass


AGAIN = b"""<script>
const times = Number(sessionStorage.times ?? 0);
if (times < 9) onload = () => setTimeout(() => { sessionStorage.times = times + 1; location.reload(); }, 20);
</script>"""
ANSWERS = {
    "/again": AGAIN,
    "/always": b"<script>setInterval(() => location.reload(), 20)</script>",
    "/late": b"<script src='/script.js'></script>",
    "/script.js": b"document.title = 'late'",
}


def test_pages_may_load_themselves_again(tmp_path: Path) -> None:
    """They are asked meanwhile, and one of their loads is not that of the next page."""
    with (
        chromium(tmp_path / "browser") as page,
        ThreadingHTTPServer(("127.0.0.1", 0), _Reloading) as server,
    ):
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            page.visit(f"{address}/again")
            until(page, "(await new Promise((done) => setTimeout(done, 30)), sessionStorage.times === '9')")
            for _ in range(5):
                page.visit(f"{address}/always")
                time.sleep(0.2)  # its loads wait to be read
                page.visit(f"{address}/late")
                assert page.value("document.title") == "late"
        finally:
            server.shutdown()
            thread.join()
