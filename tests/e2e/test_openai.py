"""What a user of the official `openai` client sees."""

import json

import httpx
import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_classic

ASK = [{"role": "user", "content": "Count from one to twenty in words."}]


def chat(client, model, **more):
    options = {"model": model, "messages": ASK, "max_tokens": 24, "temperature": 0, **more}
    return client.chat.completions.create(**options)


def joined(stream):
    """Text, finish reason, usage and chunks of a stream's first choice."""
    text, reason, usage, chunks = "", None, None, []
    for chunk in stream:
        chunks.append(chunk)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage, chunks


def test_plain_and_stream_agree(client, model):
    plain = chat(client, model)
    assert plain.object == "chat.completion" and plain.model == model
    assert plain.choices[0].message.role == "assistant"
    assert plain.choices[0].finish_reason in ("stop", "length")
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    assert plain.usage.completion_tokens <= 24
    text, reason, usage, chunks = joined(chat(client, model, stream=True, stream_options={"include_usage": True}))
    assert text == plain.choices[0].message.content and text
    assert reason == plain.choices[0].finish_reason
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0, "the same prompt came before"
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [bool(chunk.choices[0].delta.role) for chunk in chunks[:-1]] == [True] + [False] * (len(chunks) - 2)
    assert all(choice.finish_reason is None for chunk in chunks[:-2] for choice in chunk.choices)


def test_completions(client, model):
    plain = client.completions.create(model=model, prompt="One, two, three,", max_tokens=8, temperature=0)
    stream = client.completions.create(model=model, prompt="One, two, three,", max_tokens=8, temperature=0, stream=True)
    assert plain.object == "text_completion"
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text


def test_stop_text(client, model):
    whole = chat(client, model).choices[0].message.content
    assert len(whole) > 12
    for stop in (whole[5:9], whole[:3], [whole[8:12], "never"]):
        first = stop if isinstance(stop, str) else stop[0]
        want = whole[: whole.index(first)]
        plain = chat(client, model, stop=stop)
        assert plain.choices[0].message.content == want
        assert plain.choices[0].finish_reason == "stop"
        assert joined(chat(client, model, stop=stop, stream=True))[:2] == (want, "stop")


def test_logprobs(client, model):
    plain = chat(client, model, max_tokens=6, logprobs=True, top_logprobs=5)
    content = plain.choices[0].logprobs.content
    assert len(content) == plain.usage.completion_tokens or plain.choices[0].finish_reason == "stop"
    raw = b"".join(bytes(entry.bytes) for entry in content)
    assert raw.decode(errors="ignore").strip() == plain.choices[0].message.content.strip()
    for entry in content:
        assert len(entry.top_logprobs) == 5 and entry.logprob <= 0
        assert max(top.logprob for top in entry.top_logprobs) == entry.logprob, "greedy takes the likeliest"
    chunks = joined(chat(client, model, max_tokens=6, logprobs=True, top_logprobs=5, stream=True))[3]
    streamed = [e for chunk in chunks for choice in chunk.choices if choice.logprobs for e in choice.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    for a, b in zip(streamed, content):
        assert abs(a.logprob - b.logprob) < 1e-3


def test_legacy_logprobs_and_echo(client, model):
    prompt = "The capital of France is"
    reply = client.completions.create(model=model, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    choice = reply.choices[0]
    assert choice.text == prompt
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == reply.usage.prompt_tokens


def test_seed_and_choices(client, model):
    options = {"temperature": 1.2, "max_tokens": 16, "n": 3}
    a = chat(client, model, seed=42, **options)
    b = chat(client, model, seed=42, **options)
    texts = [choice.message.content for choice in a.choices]
    assert texts == [choice.message.content for choice in b.choices]
    assert len(set(texts)) > 1 and [choice.index for choice in a.choices] == [0, 1, 2]
    assert a.model_extra["seed"] == 42
    seeds = {chat(client, model, max_tokens=1).model_extra["seed"] for _ in range(5)}
    assert len(seeds) >= 4


@pytest.mark.parametrize(
    ("more", "kind", "param"),
    [
        ({"temperature": 500}, openai.BadRequestError, "temperature"),
        ({"top_p": -0.3}, openai.BadRequestError, "top_p"),
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 200_000}]}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "no_such_field"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, model, more, kind, param, stream):
    fields = {"model": model, "stream": stream, **more}
    with pytest.raises(kind) as caught:
        chat(client, **fields)
    assert caught.value.body["param"] == param
    assert caught.value.body["type"] == "invalid_request_error"
    chat(client, model, max_tokens=1)


def test_no_replacement_characters(client, model):
    ask = [{"role": "user", "content": "Repeat exactly: 👩‍👩‍👧 Привет 안녕하세요 🇺🇦"}]
    for more in ({}, {"logprobs": True}):
        text, _, _, chunks = joined(chat(client, model, messages=ask, max_tokens=40, stream=True, **more))
        assert text == chat(client, model, messages=ask, max_tokens=40, **more).choices[0].message.content
        assert all("\ufffd" not in (choice.delta.content or "") for chunk in chunks for choice in chunk.choices)


def metrics(root, kind="text/plain"):
    accept = "application/openmetrics-text;version=1.0.0" if kind == "open" else kind
    text = httpx.get(f"{root}/metrics", headers={"accept": accept}).text
    families = (parse_open if kind == "open" else parse_classic)(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def until(check, seconds=30):
    import time

    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_metrics(client, model, root):
    before = metrics(root)
    chat(client, model, max_tokens=5)
    for kind in ("text/plain", "open"):
        after = metrics(root, kind)
        tokens = ("dynalm_generation_tokens_total", ())
        assert after[tokens] - before[tokens] in range(1, 6)
        assert after[("dynalm_time_to_first_token_seconds_count", ())] >= 1
        assert after[("vllm:num_requests_running", ())] == 0
        assert any(name == "vllm:cache_config_info" for name, _ in after)


def test_who_leaves_is_cancelled(client, model, root):
    for stream in (True, False):
        before = metrics(root)[("dynalm_requests_finished_total", (("reason", "cancelled"),))]
        body = {"model": model, "messages": ASK, "stream": stream, "ignore_eos": True, "temperature": 0}
        url = f"{root}/v1/chat/completions"
        if stream:
            with httpx.stream("POST", url, json=body, timeout=60) as reply:
                lines = reply.iter_lines()
                for _ in range(4):
                    next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=httpx.Timeout(60, read=1.0))
        key = ("dynalm_requests_finished_total", (("reason", "cancelled"),))
        until(lambda: metrics(root)[key] == before + 1)
        until(lambda: metrics(root)[("dynalm_requests_running", ())] == 0)
        assert metrics(root)[("dynalm_kv_pages_used", ())] == 0


def test_tokens_and_templates(root, model):
    post = lambda path, body: httpx.post(f"{root}{path}", json=body).json()
    tokens = post("/tokenize", {"prompt": "Hello, world", "add_special_tokens": False})["tokens"]
    assert post("/detokenize", {"tokens": tokens})["prompt"] == "Hello, world"
    rendered = post("/apply-template", {"messages": ASK})["prompt"]
    assert ASK[0]["content"] in rendered
    assert post("/tokenize", {"messages": ASK})["count"] > len(tokens)


def test_models(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_raw_stream_form(root, model):
    body = {"model": model, "messages": ASK, "stream": True, "max_tokens": 3}
    reply = httpx.post(f"{root}/v1/chat/completions", json=body, timeout=60)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]" and reply.text.count("[DONE]") == 1
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"
