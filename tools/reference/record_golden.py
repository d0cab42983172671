#!/usr/bin/env python3
"""Records a golden bundle (docs/golden-bundle.md) of a pair of checkpoints: target and drafter in PyTorch, independent of
this program's own code.

The target's layers are plain_models.py or, with --reference transformers, the library's own modules; the drafter is
plain_models.py. Prompts are a list of objects as in a bundle: "kind", and "prompt_ids", "text" or "chat" (the last two
need transformers' tokenizer). Every round runs the target over the whole text again: simple, and slow for long ones.

    tools/reference/record_golden.py --model models/tiny-qwen3.6 --draft-model models/tiny-qwen3.6-dflash \
        --prompts tests/golden/golden.json --tensor-prompts 0,3,16 --jobs 8 --out /tmp/bundle
    dflashctl golden compare /tmp/bundle tests/golden
"""

import argparse
import json
import multiprocessing
import os
import struct
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from checkpoint_files import Tensors, layer_types, parts_of_bundle, read_contract  # noqa: E402
from plain_models import PlainDrafter, PlainTarget, rms  # noqa: E402

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
LAST_ROWS = 16  # of taps and context features
FIRST_ROWS = 64  # of hidden states


class Checkpoint(Tensors):
    def get(self, name, device, dtype):
        entry = self.tensors[name][2]
        data = torch.frombuffer(bytearray(self.read(name, 0, self.size(name))), dtype=DTYPES[entry["dtype"]])
        return data.reshape(entry["shape"]).to(device=device, dtype=dtype)


class Target:
    def __init__(self, args, device, dtype):
        with open(os.path.join(args.model, "config.json")) as file:
            config = json.load(file)
        self.config = config.get("text_config", config)
        weights = Checkpoint(args.model)
        if args.reference == "plain":
            self.model = PlainTarget(self.config, device)
        else:
            from plain_models import TransformersTarget

            self.model = TransformersTarget(self.config, device, keep=True)
        get = lambda name: weights.get(name, device, dtype)  # noqa: E731
        self.layers = []
        for index in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{index}."
            self.layers.append({n[len(prefix):]: get(n) for n in weights.tensors if n.startswith(prefix)})
        self.embedding, self.norm = get("embed_tokens.weight"), get("norm.weight")
        self.head = get("lm_head.weight") if "lm_head.weight" in weights.tensors else self.embedding
        self.device = device

    def forward(self, tokens):
        """Hidden states: embedding, output of every layer, the last one behind the final norm; logits of every row."""
        states = [self.embedding[torch.tensor(tokens, device=self.device)]]
        for index, weights in enumerate(self.layers):
            states.append(self.model.layer(index, weights, states[-1]))
        taps = list(states)
        states[-1] = rms(states[-1], self.norm, self.config["rms_norm_eps"], True)
        return states, taps, states[-1] @ self.head.T


class Drafter:
    def __init__(self, args, device, dtype):
        with open(os.path.join(args.draft_model, "config.json")) as file:
            config = json.load(file)
        weights = Checkpoint(args.draft_model)
        self.weights = {name: weights.get(name, device, dtype) for name in weights.tensors}
        self.contract = read_contract(config)
        self.model = PlainDrafter({**config, "rope_theta": self.contract["rope_theta"], "layer_types": layer_types(config),
                                   "sliding_window": max(layer["window"] for layer in self.contract["layers"])})
        for kind in self.contract["layers"]:  # what PlainDrafter computes
            if (kind["kind"] == "sliding_attention") != kind["causal"]:
                sys.exit(f"layers that are {kind} are not in plain_models.py")

    def features(self, taps):
        return self.model.features(self.weights, torch.cat([taps[k + 1] for k in self.contract["target_layer_ids"]], -1))


def generate(target, drafter, prompt, max_tokens, stops, vocabulary):
    """Greedy text in rounds; the record of the first forward pass and the first block."""
    block, mask = drafter.contract["block_size"], drafter.contract["mask_token_id"]
    states, taps, logits = target.forward(prompt)
    first = {"hidden_states": torch.stack([state[:FIRST_ROWS] for state in states]), "last_logits": logits[-1],
             "taps_last16": torch.cat([taps[k + 1] for k in drafter.contract["target_layer_ids"]], -1)[-LAST_ROWS:]}
    features = drafter.features(taps)
    first["context_feature_last16"] = features[-LAST_ROWS:]
    output, lengths = [logits[-1, :vocabulary].argmax().item()], []
    while output[-1] not in stops and len(output) < max_tokens:
        rows = torch.tensor([output[-1]] + [mask] * (block - 1), device=target.device)
        y = drafter.model.block(drafter.weights, features, target.embedding[rows])
        draft_logits = y[1:] @ target.head.T
        first.setdefault("draft_logits", draft_logits)
        drafts = draft_logits[:, :vocabulary].argmax(-1).tolist()
        known = prompt + output
        _, taps, logits = target.forward(known + drafts)
        own = logits[len(known) - 1:, :vocabulary].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == own[accepted]:
            accepted += 1
        before = len(output)
        features = drafter.features([tap[: len(known) + accepted] for tap in taps])
        for token in own[: accepted + 1]:
            output.append(token)
            if token in stops or len(output) == max_tokens:
                break
        lengths.append(min(accepted + 1, len(output) - before + 1))  # the last round may count one token past the end
    return output, lengths, first


def encode(model, prompt):
    if "prompt_ids" in prompt:
        return prompt["prompt_ids"]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if "chat" in prompt:
        chat = prompt["chat"]
        extra = {k: chat[k] for k in ("enable_thinking",) if k in chat}
        prompt["text"] = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True, **extra)
    return tokenizer(prompt["text"], add_special_tokens=False)["input_ids"]


def write_tensors(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class Recorder:
    """The pair, loaded, and how it records one prompt after the other."""

    def __init__(self, args):
        device, dtype = torch.device(args.device), getattr(torch, args.dtype)
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
        if args.jobs > 1:
            torch.set_num_threads(1)
        self.args = args
        self.target, self.drafter = Target(args, device, dtype), Drafter(args, device, dtype)
        self.stops = set()
        generation = os.path.join(args.model, "generation_config.json")
        if os.path.exists(generation):
            with open(generation) as file:
                eos = json.load(file).get("eos_token_id", [])
            self.stops = set(eos if isinstance(eos, list) else [eos])
        self.vocabulary = args.vocabulary or self.target.config["vocab_size"]
        self.chosen = [int(n) for n in args.tensor_prompts.split(",") if n]

    @torch.no_grad()
    def record(self, number, prompt):
        ids = encode(self.args.model, prompt)
        output, lengths, first = generate(self.target, self.drafter, ids, self.args.max_tokens, self.stops, self.vocabulary)
        record = {"kind": prompt.get("kind", "text"), "text": prompt.get("text", ""), "prompt_ids": ids, "output_ids": output,
                  "acceptance_lengths": lengths}
        if "chat" in prompt:
            record["chat"] = prompt["chat"]
        kept = first if number in self.chosen else {}
        mean = sum(lengths) / len(lengths) if lengths else 0
        print(f"prompt {number} ({record['kind']}): {len(output)} tokens, {mean:.2f} per round", flush=True)
        return record, {f"p{number}.{name}": tensor.float().cpu().numpy() for name, tensor in kept.items()}


def start_job(args):
    global recorder
    recorder = Recorder(args)


def run_job(numbered):
    return recorder.record(*numbered)


def main(args):
    with open(args.prompts) as file:
        prompts = list(enumerate(json.load(file)))
    beside = os.path.join(os.path.dirname(args.prompts), "bundle.json")  # prompts of a bundle that keeps their chats apart
    if os.path.exists(beside):
        with open(beside) as file:
            for number, chat in json.load(file).get("chats", {}).items():
                prompts[int(number)][1].setdefault("chat", chat)
    if args.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(args.jobs, start_job, (args,)) as pool:
            # The longest first, so that none of them is begun last.
            order = sorted(prompts, key=lambda prompt: -len(prompt[1].get("prompt_ids", prompt[1].get("text", ""))))
            results = [result for _, result in sorted(zip([number for number, _ in order],
                                                          pool.map(run_job, order, chunksize=1)), key=lambda r: r[0])]
    else:
        start_job(args)
        results = [run_job(prompt) for prompt in prompts]
    records = [record for record, _ in results]
    tensors = {name: tensor for _, kept in results for name, tensor in kept.items()}
    os.makedirs(args.out)
    write_tensors(os.path.join(args.out, "tensors.safetensors"), tensors)
    bundle = {"producer": f"PyTorch {torch.__version__}, {args.reference}, {args.dtype}", "prompts": "prompts.json",
              "tensors": "tensors.safetensors", **parts_of_bundle(args.model, args.draft_model)}
    for name, value in (("prompts.json", records), ("bundle.json", bundle)):
        with open(os.path.join(args.out, name), "w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True, help="new folder")
    parser.add_argument("--reference", choices=["plain", "transformers"], default="plain")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tensor-prompts", default="0", help="numbers of the prompts whose tensors are written")
    parser.add_argument("--jobs", type=int, default=1, help="processes, a prompt at a time each; on the CPU")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=0, help="real token ids; 0: all rows of the embedding")
    args = parser.parse_args()
    main(args)
