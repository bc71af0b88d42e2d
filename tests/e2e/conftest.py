"""A server for the tests: the real program with a real model.

`E2E_BIN` is the program and `E2E_MODEL` the model. With `E2E_URL` (…/v1) the tests that need no server
of their own run against that one instead.
"""

import os
import re
import signal
import subprocess
import threading
import time

import httpx
import openai
import pytest

READY_S = 300


class Server:
    """A `dynalm serve` process on a free port."""

    def __init__(self, *options, env=None):
        command = [os.environ["E2E_BIN"], "serve", os.environ["E2E_MODEL"], "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, **(env or {})}
        )
        self.log = []
        self._bound = threading.Event()
        self.root = None
        threading.Thread(target=self._read, daemon=True).start()
        assert self._bound.wait(READY_S), self.text()
        assert self.root, f"the server ended with {self.process.wait()}: {self.text()}"

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"listening on (http://\S+)", line)
            if found and not self.root:
                self.root = found.group(1).rstrip("/")
                self._bound.set()
        self._bound.set()

    def text(self):
        return "".join(self.log)

    def wait_ready(self):
        end = time.monotonic() + READY_S
        while httpx.get(f"{self.root}/health").status_code != 200:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.05)
        return self

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise


@pytest.fixture(scope="session")
def root():
    url = os.environ.get("E2E_URL")
    if url:
        yield url.removesuffix("/").removesuffix("/v1")
        return
    server = Server().wait_ready()
    yield server.root
    server.stop()
    assert server.process.returncode == 0, server.text()


@pytest.fixture(scope="session")
def client(root):
    with openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id
