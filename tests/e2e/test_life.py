"""How a server process starts and ends."""

import os
import signal
import time

import httpx
import openai
import pytest

from conftest import Server

pytestmark = pytest.mark.skipif("E2E_BIN" not in os.environ, reason="needs the program itself")
LONG = {"prompt": "Once upon a time", "ignore_eos": True, "stream": True, "temperature": 0}


def start_stream(server):
    stream = httpx.stream("POST", f"{server.root}/v1/completions", json=LONG, timeout=120)
    reply = stream.__enter__()
    lines = reply.iter_lines()
    assert next(lines).startswith("data: ")
    return stream, lines


def test_health_while_loading():
    server = Server()
    try:
        seen = set()
        end = time.monotonic() + 300
        while 200 not in seen:
            reply = httpx.get(f"{server.root}/health")
            seen.add(reply.status_code)
            if reply.status_code == 503:
                assert reply.json()["status"] == "loading" and "retry-after" in reply.headers
            assert httpx.get(f"{server.root}/metrics").status_code == 200
            assert time.monotonic() < end
        assert seen <= {200, 503}
    finally:
        server.stop()
    assert server.process.returncode == 0, server.text()


def test_the_first_signal_drains_and_the_second_ends_at_once():
    server = Server().wait_ready()
    stream, lines = start_stream(server)
    server.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 20
    while (reply := httpx.get(f"{server.root}/health")).json()["status"] != "draining":
        assert time.monotonic() < end
    assert reply.status_code == 503
    refused = httpx.post(f"{server.root}/v1/completions", json=LONG)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert next(line for line in lines if line).startswith("data: "), "the running request goes on"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(5) != 0
    stream.__exit__(None, None, None)


def test_keys():
    server = Server(env={"DYNALM_SERVER_API_KEYS": "alpha,beta"}).wait_ready()
    try:
        for key in ("alpha", "beta"):
            assert openai.OpenAI(base_url=f"{server.root}/v1", api_key=key).models.list().data
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.root}/v1", api_key="gamma").models.list()
        assert "alpha" not in server.text()
    finally:
        server.stop()
