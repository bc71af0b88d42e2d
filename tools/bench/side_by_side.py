#!/usr/bin/env python3
"""Our benchmark and llama.cpp's in turn on one file: medians, spread and ratios.

usage: side_by_side.py --dynalm BIN --peer DIR --model FILE [--rounds N] [--prefill N,...] [--decode N,...]
                       [--users N,...] [--context N] [--threads N] [--servers]

`--peer` is the folder with llama-bench, llama-batched-bench and llama-server, built with GGML_NATIVE=ON. `--decode` are
contexts from which 128 tokens are decoded. A round runs ours, then theirs, so that a slow phase of the machine meets
both; a ratio is taken per round. What only one of the two states has none: of ours, which share of a streaming read the
reading of weights and cache reached while decoding (`share of read`, measured beside each round). `--servers` compares
the two servers as well: as many users as the last of `--users`, prompts of `--context` tokens that differ, 128 tokens in
answer. Prints one JSON object.
"""
import argparse, json, os, socket, statistics, subprocess, time, urllib.request

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
            figures[f"decode from {n} share of read"] = r["read_share"]
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


def served(a, command, port):
    """One server's figures, started and ended here so that the other has the machine to itself."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url + "/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        else:
            raise SystemExit(f"{command[0]} does not answer")
        r = records([a.dynalm, "benchmark", "--url", url, "--rounds", "1", "--prefill", "0", "--decode", "0", "--users",
                     str(a.users[-1]), "--user-context", str(a.context), "--user-decode", str(REPLY), "--json"])[-1]
        return {"output tokens/s": r["tokens_per_s"], "first token ms": r["ttft_ms"]["p50"],
                "gap p99 ms": r["gap_ms"]["p99"]}
    finally:
        server.terminate()
        server.wait()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def servers(a):
    n, t = a.users[-1], str(a.threads)
    each = a.context + REPLY + 64
    room = str(n * each)
    port = free_port()
    mine = served(a, [a.dynalm, "serve", a.model, "--port", str(port), "--threads", t, "--ctx",
                      str(each), "--kv-tokens", room, "--max-seqs", str(n)], port)
    port = free_port()
    peer = served(a, [os.path.join(a.peer, "llama-server"), "-m", a.model, "--port", str(port), "-t", t, "-tb", t, "-np",
                      str(n), "-c", room], port)
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
    a = ap.parse_args()
    rounds = []
    for _ in range(a.rounds):
        mine, peer = ours(a), theirs(a)
        if a.servers:
            for figures, more in zip((mine, peer), servers(a)):
                figures.update(more)
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
