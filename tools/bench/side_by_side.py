#!/usr/bin/env python3
"""Our benchmark and llama.cpp's in turn on one file: medians, spread and ratios.

usage: side_by_side.py --dynalm BIN --peer DIR --model FILE [--rounds N] [--prefill N,...] [--decode N,...]
                       [--users N,...] [--context N] [--threads N] [--servers] [--load]

`--peer` is the folder with llama-bench, llama-batched-bench and llama-server, built with GGML_NATIVE=ON. `--decode` are
contexts from which 128 tokens are decoded. A round runs ours, then theirs, so that a slow phase of the machine meets
both; a ratio is taken per round. What only one of the two states has none: of ours, which share of a streaming read the
reading of weights and cache reached while decoding (`share of read`, measured beside each round). `--servers` compares
the two servers as well: as many users as the last of `--users`, prompts of `--context` tokens that differ, 128 tokens in
answer.

`--load` compares how the two servers come up, with files in the page cache (one start of each is not counted): `start to
first token s` from starting the process to the first text of a streamed reply to `Hello`, asked for as soon as /health
says so; `peak resident MiB` of that process by then (VmHWM: pages of the file that it maps count), with a context of
`--context` tokens for one request. llama-server is told `--no-warmup`, since ours makes no empty run either.

Prints one JSON object.
"""
import argparse, contextlib, json, os, socket, statistics, subprocess, time, urllib.request

REPLY = 128


def records(args):
    out = subprocess.run(args, check=True, capture_output=True, text=True).stdout
    return [r for r in map(json.loads, out.splitlines()) if r["record"] == "round"]


def ours(a):
    figures = {}
    base = [a.dynalm, "benchmark", a.model, "--rounds", "1", "--threads", str(a.threads), "--json"]
    for n in a.prefill:
        for r in records(base + ["--prefill", str(n), "--decode", "0", "--users", "0"]):
            figures[f"prefill {n}"] = r["tokens_per_s"]
    for n in a.decode:
        for r in records(base + ["--prefill", "0", "--decode", "128", "--context", str(n), "--users", "0"]):
            figures[f"decode from {n}"] = r["steady_tokens_per_s"] or r["tokens_per_s"]
            figures[f"decode from {n} share of read"] = r.get("read_share")
    for n in a.users:
        # Replies long enough that all users decode together for a while: prompts are prefilled meanwhile.
        reply = 32 + n * a.context // 128
        for r in records(base + ["--prefill", "0", "--decode", "0", "--users", str(n), "--user-context", str(a.context),
                                 "--user-decode", str(reply)]):
            figures[f"{n} users"] = r["steady_tokens_per_s"] or r["tokens_per_s"]
    return figures


def theirs(a):
    figures, threads = {}, ["-t", str(a.threads)]
    # Prompts from an empty context, replies from each depth.
    tests = [["-p", ",".join(map(str, a.prefill)), "-n", "0"]] if a.prefill else []
    tests += [["-p", "0", "-n", "128", "-d", ",".join(map(str, a.decode))]] if a.decode else []
    for test in tests:
        bench = subprocess.run([os.path.join(a.peer, "llama-bench"), "-m", a.model, *threads, *test, "-r", "1", "-o", "json"],
                               check=True, capture_output=True, text=True).stdout
        for r in json.loads(bench):
            name = f"decode from {r['n_depth']}" if r["n_gen"] else f"prefill {r['n_prompt']}"
            figures[name] = r["avg_ts"]
    for n in a.users:
        out = subprocess.run(
            [os.path.join(a.peer, "llama-batched-bench"), "-m", a.model, *threads, "-c", str(n * (a.context + 16) + 64),
             "-npp", str(a.context), "-ntg", "16", "-npl", str(n), "--output-format", "jsonl"],
            check=True, capture_output=True, text=True).stdout
        for line in out.splitlines():
            if line.startswith("{"):
                figures[f"{n} users"] = json.loads(line)["speed_tg"]
    return figures


@contextlib.contextmanager
def running(command, poll):
    """A server that is ready, its process and address: asked every `poll` seconds, and ended at the end."""
    port = free_port()
    server = subprocess.Popen(command + ["--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=1)
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} does not answer")
                time.sleep(poll)
        yield server, url
    finally:
        server.terminate()
        server.wait()


def served(a, command):
    """One server's figures, started and ended here so that the other has the machine to itself."""
    with running(command, 0.2) as (_, url):
        r = records([a.dynalm, "benchmark", "--url", url, "--rounds", "1", "--prefill", "0", "--decode", "0", "--users",
                     str(a.users[-1]), "--user-context", str(a.context), "--user-decode", str(REPLY), "--json"])[-1]
        return {"output tokens/s": r["tokens_per_s"], "first token ms": r["ttft_ms"]["p50"],
                "gap p99 ms": r["gap_ms"]["p99"]}


def first_text(url):
    """Returns when the first text of a reply has come."""
    ask = {"model": "m", "prompt": "Hello", "max_tokens": 4, "temperature": 0, "stream": True}
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(ask).encode(), kind)
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {") and any(c.get("text") for c in json.loads(line[6:]).get("choices", [])):
                return
    raise SystemExit("a reply without text")


def loaded(command):
    """How one server comes up. See the top."""
    start = time.monotonic()
    with running(command, 0.005) as (server, url):
        first_text(url)
        took = time.monotonic() - start
        with open(f"/proc/{server.pid}/status") as status:
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return {"start to first token s": took, "peak resident MiB": peak / 1024}


def loads(a):
    t, room = str(a.threads), str(a.context)
    mine = [a.dynalm, "serve", a.model, "--threads", t, "--ctx", room, "--kv-tokens", room, "--max-seqs", "1"]
    peer = [os.path.join(a.peer, "llama-server"), "-m", a.model, "-t", t, "-tb", t, "-c", room, "-np", "1"]
    peer.append("--no-warmup")
    return [loaded(command + ["--alias", "m"]) for command in (mine, peer)]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def servers(a):
    n, t = a.users[-1], str(a.threads)
    each = a.context + REPLY + 64
    room = str(n * each)
    mine = served(a, [a.dynalm, "serve", a.model, "--threads", t, "--ctx", str(each), "--kv-tokens", room,
                      "--max-seqs", str(n)])
    peer = served(a, [os.path.join(a.peer, "llama-server"), "-m", a.model, "-t", t, "-tb", t, "-np", str(n), "-c",
                      room])
    return mine, peer


def main():
    numbers = lambda text: [int(n) for n in text.split(",") if n]
    ap = argparse.ArgumentParser()
    ap.add_argument("--dynalm", required=True)
    ap.add_argument("--peer", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--prefill", type=numbers, default=[512])
    ap.add_argument("--decode", type=numbers, default=[0])
    ap.add_argument("--users", type=numbers, default=[16])
    ap.add_argument("--context", type=int, default=256)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--servers", action="store_true")
    ap.add_argument("--load", action="store_true")
    a = ap.parse_args()
    more = [servers] if a.servers else []
    if a.load:
        loads(a)
        more.append(loads)
    rounds = []
    for _ in range(a.rounds):
        mine, peer = ours(a), theirs(a)
        for compare in more:
            for figures, found in zip((mine, peer), compare(a)):
                figures.update(found)
        rounds.append((mine, peer))
    print(json.dumps(summed(a, rounds)))


def summed(a, rounds):
    """The report of rounds, each a pair of figures by name: ours and theirs. What a side lacks in a round it lacks."""
    report = {"model": os.path.basename(a.model), "rounds": a.rounds, "context": a.context, "threads": a.threads}
    show = lambda v: [round(min(v), 2), round(statistics.median(v), 2), round(max(v), 2)]
    for figure in dict.fromkeys(name for sides in rounds for side in sides for name in side):
        sides = {}
        for i, engine in enumerate(("dynalm", "llama.cpp")):
            values = [r[i].get(figure) for r in rounds]
            if None not in values:
                sides[engine] = values
        if sides:
            report[figure] = {engine: show(values) for engine, values in sides.items()}
        if len(sides) == 2:
            report[figure]["ratio"] = show([m / p for m, p in zip(*sides.values())])
    return report


if __name__ == "__main__":
    main()
