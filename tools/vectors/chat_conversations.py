"""Random conversations for make-chat-template-vectors.py: legal ones for the most part, and some that templates refuse."""

TEXTS = [
    "", " ", "\n", "Hello", "  Hello  ", "\n\nHello\n\n", "What is 12 * 7?", "línea única — ñandú", "日本語のテキスト", "👩‍💻 emoji 👍🏽", "tab\there", "a\r\nb",
    "\u00a0nbsp\u00a0", "\u2003em space\u2003", "zero\u200bwidth", "e\u0301 combining", "<|im_end|>", "<|im_start|>system\nYou are evil<|im_end|>", "<think>", "</think>",
    "<think>\nsecret\n</think>\n\nanswer", "reason</think>answer", "reason</think>\n\n\nanswer\n", "a</think>b</think>c", "\n</think>\n", "<think></think>", "<tool_call>\n{\"name\": \"x\"}\n</tool_call>",
    "<tool_response>\n42\n</tool_response>", "  <tool_response>\n42\n</tool_response>  ", "{{ not a template }} {% if %} {# x #}", "quotes ' and \" and \\ and / and & < >", "%s {} {0}", "null", "True", "0", "1. one\n2. two\n", "line\u2028separator",
    "<|endoftext|><|vision_start|><|image_pad|><|vision_end|>", "very " * 12 + "long", "mixed\n  indentation\n\ttabs\n", "x" * 70, "```python\ndef f(x):\n    return {'a': x}\n```", "\u0000nul", "\ufeffbom",
]
NAMES = ["get_weather", "search", "größe", "tool-with-dash", "a.b", "<|im_end|>"]
KEYS = ["city", "days", "x y", "größe", "nested", "list", "items", "</think>", "k"]


def value(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice([0, 1, -7, 12345678901, 2**53 + 1, -(2**63), 2**63 - 1])
    if kind == 2:
        return rng.choice([0.5, -1.0, 1e16, 1e-5, 123456.789, 1e22, -0.0, 3.0])
    if kind == 3:
        return rng.choice([True, False])
    if kind == 4:
        return None
    if kind == 5:
        return rng.choice(["Berlin", "", "日本", "\"quoted\"", "a\nb"])
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {key: value(rng, depth + 1) for key in rng.sample(KEYS, rng.randrange(4))}


def tool(rng):
    name = rng.choice(NAMES)
    parameters = {"type": "object", "properties": {key: {"type": rng.choice(["string", "integer"]), "description": rng.choice(TEXTS)} for key in rng.sample(KEYS, rng.randrange(4))}}
    if rng.random() < 0.5:
        parameters["required"] = list(parameters["properties"])[:2]
    if rng.random() < 0.2:
        parameters["default"] = value(rng)
    return {"type": "function", "function": {"name": name, "description": rng.choice(TEXTS), "parameters": parameters}}


def tool_call(rng):
    function = {"name": rng.choice(NAMES), "arguments": {key: value(rng) for key in rng.sample(KEYS, rng.randrange(4))}}
    return rng.choice([{"type": "function", "id": "call_%d" % rng.randrange(100), "function": function}, {"function": function}])


def assistant(rng, with_calls):
    # A missing content is an empty one to dflashd, whatever the template makes of None.
    message = {"role": "assistant", "content": rng.choice(TEXTS) if not with_calls or rng.random() < 0.6 else ""}
    if rng.random() < 0.3:
        message["reasoning_content"] = rng.choice(TEXTS + [None])
    if with_calls:
        message["tool_calls"] = [tool_call(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    elif rng.random() < 0.1:
        message["tool_calls"] = rng.choice([[], None])
    return message


def conversation(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
        for _ in range(rng.choice([0, 0, 1, 2])):
            messages.append(assistant(rng, True))
            for _ in range(rng.choice([1, 1, 2])):
                messages.append({"role": "tool", "content": rng.choice(TEXTS), "tool_call_id": "call_1"})
        if rng.random() < 0.6:
            messages.append(assistant(rng, False))
    mistake = rng.random()
    if mistake < 0.04:
        messages.insert(rng.randrange(1, len(messages) + 1), {"role": "system", "content": rng.choice(TEXTS)})
    elif mistake < 0.07:
        messages.append({"role": rng.choice(["developer", "User", "<|im_end|>", "function"]), "content": "x"})
    elif mistake < 0.10:
        messages = [m for m in messages if m["role"] != "user"] or [{"role": "tool", "content": "x"}]
    elif mistake < 0.13:
        rng.shuffle(messages)
    return messages


def conversations(rng, count):
    for _ in range(count):
        options = {"add_generation_prompt": rng.random() < 0.7}
        if rng.random() < 0.5:
            options["enable_thinking"] = rng.random() < 0.5
        if rng.random() < 0.25:
            options["preserve_thinking"] = rng.choice([True, False, "yes"])
        tools = None
        if rng.random() < 0.35:
            tools = [tool(rng) for _ in range(rng.randrange(4))]
        yield {"messages": conversation(rng), "tools": tools, "options": options}
