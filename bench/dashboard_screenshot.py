"""Takes a picture of the dashboard of a host that runs: ``python bench/dashboard_screenshot.py --url http://...``.

The browser's clock runs as fast as it gets answers. This program stands between it and the host and gives one answer a
second, so that the page has watched for as long as it shows.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from moeoffload.serve.dashboard import dashboard_page

ANSWER_S = 10.0


def pacing(url: str, key: str) -> type[BaseHTTPRequestHandler]:
    """Gives the page, and the host's figures once a second."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/dashboard":
                self._answer(200, "text/html; charset=utf-8", dashboard_page().encode())
                return
            if self.path != "/stats":
                self._answer(404, "text/plain", b"")
                return
            time.sleep(1)
            request = urllib.request.Request(f"{url}/stats", headers={"Authorization": f"Bearer {key}"} if key else {})
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                    self._answer(200, "application/json", reply.read())
            except (OSError, ValueError) as error:
                print(f"{url}: {error}", file=sys.stderr)
                self._answer(502, "text/plain", b"")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/images/dashboard.png"))
    parser.add_argument("--seconds", type=int, default=70, help="how long to watch before the picture is taken")
    parser.add_argument("--size", default="1280,1230", help="of the window, in pixels")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    browser = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit("error: no chromium here")
    key = arguments.api_key_file.read_text().strip() if arguments.api_key_file else ""
    server = ThreadingHTTPServer(("127.0.0.1", 0), pacing(arguments.url.rstrip("/"), key))
    with server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={arguments.size}"]
        command += ["--blink-settings=preferredColorScheme=0"] if arguments.dark else []
        command += [f"--virtual-time-budget={1000 * arguments.seconds}", f"--screenshot={arguments.output.absolute()}"]
        command += [f"http://127.0.0.1:{server.server_address[1]}/dashboard"]
        try:
            subprocess.run(command, check=True, timeout=2 * arguments.seconds + 30, capture_output=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            sys.exit(f"error: no picture: {error}")
        finally:
            server.shutdown()
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
