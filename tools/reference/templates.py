#!/usr/bin/env python3
"""Renders chat templates with Python's jinja2, set up as transformers does, for crates/dynalm/tests/templates.rs.

usage: templates.py TEMPLATE_DIR CONVERSATIONS.json OUT.json      (needs: pip install jinja2)

For each template and conversation OUT has the list of different results over the ways one conversation can be put
(an assistant turn of tool calls alone with no content or empty content; arguments as object or as JSON text; no tools as nothing or as an empty list), errors as
{"error": text}. The way that suits a template is DynaLM's to choose; its result must be among them.
"""
import datetime
import itertools
import json
import pathlib
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = datetime.datetime(2025, 6, 15, 15, 6, 40)  # 1750000000 seconds since 1970, UTC


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote; here it only passes its body on."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def put(messages, null_content, text_arguments):
    out = []
    for message in messages:
        message = json.loads(json.dumps(message))
        if not message.get("content"):
            message["content"] = None if message.get("tool_calls") and null_content else ""
        for call in message.get("tool_calls", []):
            if not text_arguments:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        out.append(message)
    return out


def render(template, case, null_content, text_arguments, no_tools):
    try:
        return template.render(
            messages=put(case["messages"], null_content, text_arguments),
            tools=case.get("tools", no_tools),
            documents=None,
            add_generation_prompt=case.get("add_generation_prompt", True),
            bos_token="<BOS>",
            eos_token="<EOS>",
            **case.get("kwargs", {}),
        )
    except Exception as error:  # noqa: BLE001 - whatever Python raises, an error is the expected result
        return {"error": str(error)}


def main():
    folder, cases, out = map(pathlib.Path, sys.argv[1:4])
    cases = json.loads(cases.read_text())
    results = {}
    for path in sorted(folder.glob("*.jinja")):
        template = environment().from_string(path.read_text())
        results[path.stem] = {
            name: [
                json.loads(text)
                for text in dict.fromkeys(
                    json.dumps(render(template, case, *way)) for way in itertools.product([True, False], [True, False], [None, []])
                )
            ]
            for name, case in cases.items()
        }
    out.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
