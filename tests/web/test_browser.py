"""The browser of the tests: what is said of a page is said by it."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from browser import complaints
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


def test_a_page_does_not_hear_what_the_one_before_complained_of(tmp_path: Path) -> None:
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
