#!/usr/bin/python3
"""Writes the vectors of the template interpreter as answered by Jinja2 itself (3.1), set up as transformers does.

    make-chat-template-vectors.py snippets > FILE
    make-chat-template-vectors.py chats TEMPLATE_FILE_OR_TOKENIZER_CONFIG SEED COUNT > FILE

One JSON object a line. Snippets: {"group", "template", "text"} or {..., "error"}; "unsupported" when dflashd refuses the
template by name. The first line is {"variables"}. Chats: {"messages", "tools", "options", "text"} or {..., "error"}.
answer-with-huggingface-jinja.mjs adds what another implementation says. Needs python3-jinja2.
"""
import datetime
import json
import random
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

import chat_conversations
import jinja_snippets

NOW = datetime.datetime(2026, 3, 9, 7, 5, 1)


class Generation(jinja2.ext.Extension):
    """{% generation %}: transformers renders its body as the body of a call block."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


class Raised(jinja2.TemplateError):
    pass


def raise_exception(message):
    raise Raised(message)


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    result = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    result.filters["tojson"] = to_json
    result.globals["raise_exception"] = raise_exception
    result.globals["strftime_now"] = lambda text: NOW.strftime(text)
    return result


def answer(template, variables):
    try:
        return {"text": environment().from_string(template).render(**variables)}
    except Raised as error:
        return {"raises": str(error)}
    except Exception as error:  # whatever Python raises, the interpreter must refuse as well
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def write(line):
    # Escapes what a text editor or git could change.
    print(json.dumps(line, ensure_ascii=True, separators=(",", ":")))


def snippets():
    write({"variables": jinja_snippets.VARIABLES})
    for group, templates in jinja_snippets.GROUPS.items():
        for template in templates:
            write({"group": group, "template": template, **answer(template, jinja_snippets.VARIABLES)})
    for template in jinja_snippets.UNSUPPORTED:
        write({"group": "unsupported", "template": template, "unsupported": True, **answer(template, jinja_snippets.VARIABLES)})


def chats(path, seed, count):
    with open(path, encoding="utf-8") as file:
        template = file.read()
    special = {}
    if path.endswith(".json"):
        config = json.loads(template)
        template = config["chat_template"]
        special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
    for case in chat_conversations.conversations(random.Random(seed), count):
        variables = {"documents": None, **special, **case["options"], "messages": case["messages"], "tools": case["tools"]}
        write({**case, **answer(template, variables)})


if sys.argv[1:] == ["snippets"]:
    snippets()
elif len(sys.argv) == 5 and sys.argv[1] == "chats":
    chats(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
else:
    sys.exit(__doc__)
