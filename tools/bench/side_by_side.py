#!/usr/bin/env python3
"""Our benchmark and llama.cpp's in turn on one file: medians, spread and ratios.

usage: side_by_side.py --dynalm BIN --peer DIR --model FILE [--rounds N] [--users N] [--context N] [--threads N]

`--peer` is the folder with llama-bench and llama-batched-bench, built with GGML_NATIVE=ON. A round runs ours, then
theirs, so that a slow phase of the machine meets both; a ratio is taken per round. Prints one JSON object.
"""
import argparse, json, os, statistics, subprocess


def ours(a):
    # Replies long enough that all users decode together for a while: prompts are prefilled 256 tokens a step meanwhile.
    reply = 32 + a.users * a.context // 128
    out = subprocess.run(
        [a.dynalm, "benchmark", a.model, "--rounds", "1", "--prefill", "512", "--decode", "128", "--context", "0",
         "--users", str(a.users), "--user-context", str(a.context), "--user-decode", str(reply), "--threads",
         str(a.threads), "--json"],
        check=True, capture_output=True, text=True).stdout
    rounds = [r for r in map(json.loads, out.splitlines()) if r["record"] == "round"]
    return {r["figure"]: r["steady_tokens_per_s"] or r["tokens_per_s"] for r in rounds}


def theirs(a):
    bench = subprocess.run(
        [os.path.join(a.peer, "llama-bench"), "-m", a.model, "-t", str(a.threads), "-p", "512", "-n", "128", "-r", "1",
         "-o", "json"], check=True, capture_output=True, text=True).stdout
    figures = {}
    for r in json.loads(bench):
        figures["prefill" if r["n_prompt"] else "decode"] = r["avg_ts"]
    tokens = a.users * (a.context + 16)
    out = subprocess.run(
        [os.path.join(a.peer, "llama-batched-bench"), "-m", a.model, "-t", str(a.threads), "-c", str(tokens + 64),
         "-npp", str(a.context), "-ntg", "16", "-npl", str(a.users), "--output-format", "jsonl"],
        check=True, capture_output=True, text=True).stdout
    for line in out.splitlines():
        if line.startswith("{"):
            figures["users"] = json.loads(line)["speed_tg"]
    return figures


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dynalm", required=True)
    ap.add_argument("--peer", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--users", type=int, default=16)
    ap.add_argument("--context", type=int, default=256)
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    rounds = [(ours(a), theirs(a)) for _ in range(a.rounds)]
    report = {"model": os.path.basename(a.model), "rounds": a.rounds, "users": a.users, "context": a.context}
    for figure in ("decode", "prefill", "users"):
        mine, peer = [o[figure] for o, _ in rounds], [t[figure] for _, t in rounds]
        ratios = [m / p for m, p in zip(mine, peer)]
        show = lambda v: [round(min(v), 2), round(statistics.median(v), 2), round(max(v), 2)]
        report[figure] = {"dynalm": show(mine), "llama.cpp": show(peer), "ratio": show(ratios)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
