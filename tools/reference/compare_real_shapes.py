#!/usr/bin/env python3
"""Compares target and drafter with other implementations at real sizes, layer by layer, with random weights.

The reference is transformers' qwen3_5 (or --reference plain: plain_models.py) in float32 for the target, and
plain_models.py for the drafter. The weights are those of docs/spec/random-weights.md on both sides; checksums first.

Teacher-forced: layer k of every side gets the same input, the reference's hidden state k rounded to bfloat16. Errors are
relative L2 distances to the reference's float32 output over all rows of a phase. Free-running: every side follows its
own hidden states; the yardstick is transformers in bfloat16. Prints a table last and exits with 1 when a bar is missed.

    tools/reference/compare_real_shapes.py --program build/gpu/tools/real_shapes/real-shapes-cuda \
        --target tests/shapes/qwen3_6_27b --drafter tests/shapes/qwen3_6_27b_dflash --folder /dev/shm/compare
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from plain_models import PlainDrafter, PlainTarget, TransformersTarget, rms  # noqa: E402
from random_weights import checksum, mix, random_tensor  # noqa: E402

LAYER_BARS = {"BF16": 1e-2, "F32": 2e-5}  # by the dtype of our activations
FREE_LAYERS, FREE_BAR = 8, 1.2


def target_shapes(c, index=None):
    """Tensor names and shapes, as worker/model/inventory.cc has them."""
    D, ffn, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    if index is None:
        return {"embed_tokens.weight": [V, D], "norm.weight": [D], "lm_head.weight": [V, D]}
    shapes = {"input_layernorm.weight": [D], "post_attention_layernorm.weight": [D], "mlp.gate_proj.weight": [ffn, D],
              "mlp.up_proj.weight": [ffn, D], "mlp.down_proj.weight": [D, ffn]}
    if c["layer_types"][index] == "full_attention":
        q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        part = {"q_proj.weight": [2 * q, D], "k_proj.weight": [kv, D], "v_proj.weight": [kv, D], "o_proj.weight": [D, q],
                "q_norm.weight": [c["head_dim"]], "k_norm.weight": [c["head_dim"]]}
        shapes.update({"self_attn." + name: shape for name, shape in part.items()})
    else:
        HV, values = c["linear_num_value_heads"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
        qkv = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
        part = {"in_proj_qkv.weight": [qkv, D], "in_proj_z.weight": [values, D], "in_proj_b.weight": [HV, D],
                "in_proj_a.weight": [HV, D], "conv1d.weight": [qkv, 1, c["linear_conv_kernel_dim"]], "A_log": [HV],
                "dt_bias": [HV], "norm.weight": [c["linear_value_head_dim"]], "out_proj.weight": [D, values]}
        shapes.update({"linear_attn." + name: shape for name, shape in part.items()})
    return shapes


def drafter_shapes(c):
    D, ffn, taps = c["hidden_size"], c["intermediate_size"], len(c["dflash_config"]["target_layer_ids"])
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"fc.weight": [D, taps * D], "hidden_norm.weight": [D], "norm.weight": [D]}
    for i in range(c["num_hidden_layers"]):
        layer = {"input_layernorm.weight": [D], "post_attention_layernorm.weight": [D], "mlp.gate_proj.weight": [ffn, D],
                 "mlp.up_proj.weight": [ffn, D], "mlp.down_proj.weight": [D, ffn], "self_attn.q_proj.weight": [q, D],
                 "self_attn.k_proj.weight": [kv, D], "self_attn.v_proj.weight": [kv, D], "self_attn.o_proj.weight": [D, q],
                 "self_attn.q_norm.weight": [c["head_dim"]], "self_attn.k_norm.weight": [c["head_dim"]]}
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def error(actual, expected):
    expected = expected.float()
    return ((actual.float() - expected).norm() / expected.norm()).item()


class Comparison:
    def __init__(self, args):
        self.args = args
        self.device = torch.device(args.device)
        with open(os.path.join(args.target, "config.json")) as file:
            config = json.load(file)
        self.config = config.get("text_config", config)
        os.makedirs(args.folder, exist_ok=True)
        with open(os.path.join(args.drafter, "config.json")) as file:
            self.draft_config = json.load(file)
        if args.draft_window:
            self.draft_config["sliding_window"] = args.draft_window
            args.drafter = self.path("drafter")
            os.makedirs(args.drafter, exist_ok=True)
            with open(os.path.join(args.drafter, "config.json"), "w") as file:
                json.dump(self.draft_config, file)
        self.layers = self.config["num_hidden_layers"]
        self.block = self.draft_config["block_size"]
        self.prefills = [int(n) for n in args.prefills.split(",")]
        self.free = int(args.free_prefill)
        self.rows = max(self.prefills + [self.free]) + self.block
        self.eps = self.config["rms_norm_eps"]
        make = {"plain": PlainTarget, "transformers": TransformersTarget}[args.reference]
        self.reference = make(self.config, self.device)
        self.second = PlainTarget(self.config, self.device) if args.second_opinion else None
        self.results = {"cases": {}, "args": vars(args)}
        self.start = time.time()

    def log(self, text):
        print(f"[{time.time() - self.start:6.1f} s] {text}", flush=True)

    def path(self, name):
        return os.path.join(self.args.folder, name)

    def weights(self, role, shapes, prefix=""):
        return {name: random_tensor(role, prefix + name, shape, self.args.seed, self.device)
                for name, shape in shapes.items()}

    def run_program(self, *extra):
        command = [self.args.program, "--model", self.args.target, "--draft-model", self.args.drafter, "--folder",
                   self.args.folder, "--random-weights", str(self.args.seed), *extra]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print("".join("    " + line + "\n" for line in done.stdout.splitlines()), end="", flush=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: exit status {done.returncode}")

    def compare_checksums(self):
        last = next(i for i, kind in enumerate(self.config["layer_types"]) if kind == "full_attention")
        wanted = [("target", name, shape) for name, shape in target_shapes(self.config).items() if name != "embed_tokens.weight"]
        for index in (0, last):
            wanted += [("target", f"layers.{index}.{name}", shape)
                       for name, shape in target_shapes(self.config, index).items()]
        wanted += [("drafter", name, shape) for name, shape in drafter_shapes(self.draft_config).items()
                   if not name.startswith("layers.") or name.startswith("layers.0.")]
        with open(self.path("names"), "w") as file:
            file.write("".join(f"{role} {name}\n" for role, name, _ in wanted))
        self.run_program("--checksums", "names")
        with open(self.path("names.out")) as file:
            theirs = file.read().split("\n")[:-1]
        ours = [f"{checksum(random_tensor(role, name, shape, self.args.seed, self.device)):016x} {role} {name}"
                for role, name, shape in wanted]
        different = [f"{a} / {b}" for a, b in zip(ours, theirs) if a != b]
        if different or len(ours) != len(theirs):
            sys.exit("checksums differ: " + "; ".join(different))
        self.results["equal_checksums"] = len(ours)
        self.log(f"checksums of {len(ours)} tensors are equal")

    def run_reference(self):
        """Hidden states: forced[k] float32 output of layer k on the forced input, free32[k], and the library's errors."""
        embedding = random_tensor("target", "embed_tokens.weight", [self.config["vocab_size"], self.config["hidden_size"]],
                                  self.args.seed, self.device)
        # Any ids do; these never repeat in a short cycle.
        ids = [mix(i + 1) % self.config["vocab_size"] for i in range(self.rows)]
        self.tokens = torch.tensor(ids, dtype=torch.int64, device=self.device)
        with open(self.path("tokens"), "wb") as file:
            file.write(torch.tensor(ids, dtype=torch.int32).numpy().tobytes())
        h = embedding[self.tokens]
        mask_id = self.draft_config["dflash_config"]["mask_token_id"]
        self.mask_row = embedding[mask_id].clone()
        self.token_rows = h.clone()
        del embedding
        free32, free16 = h.float(), h.clone()
        self.inputs, self.forced, self.free_states = [], [], []
        self.library_forced, self.library_free, self.second_errors = [], [], []
        free_rows = self.free + self.block
        with open(self.path("states"), "wb") as file:
            for index in range(self.layers):
                file.write(h.view(torch.int16).cpu().numpy().tobytes())
                narrow = self.weights("target", target_shapes(self.config, index), f"layers.{index}.")
                wide = {name: tensor.float() for name, tensor in narrow.items()}
                self.inputs.append(h)
                out = self.reference.layer(index, wide, h.float())
                self.library_forced.append(error(self.reference.layer(index, narrow, h), out))
                if self.second is not None:
                    self.second_errors.append(error(self.second.layer(index, wide, h.float()), out))
                free32 = self.reference.layer(index, wide, free32)
                free16 = self.reference.layer(index, narrow, free16)
                self.library_free.append(error(free16[:free_rows], free32[:free_rows]))
                self.forced.append(out)
                self.free_states.append(free32[:free_rows].clone())
                h = out.to(torch.bfloat16)
                if index % 8 == 7 or index == self.layers - 1:
                    self.log(f"reference: {index + 1} layers; rms of the residual {out.pow(2).mean().sqrt():.2f}")
        globals_ = target_shapes(self.config)
        self.final_norm = random_tensor("target", "norm.weight", globals_["norm.weight"], self.args.seed, self.device)
        self.final = rms(self.forced[-1], self.final_norm, self.eps, True)

    def load(self, name, dtype, shape):
        count = math.prod(shape)
        data = torch.from_file(self.path(name), shared=False, size=count, dtype=dtype)
        return data.reshape(shape).to(self.device)

    def compare_case(self, prompt, act):
        D, total, taps = self.config["hidden_size"], prompt + self.block, self.draft_config["dflash_config"]["target_layer_ids"]
        states = torch.from_file(self.path(f"forced_{prompt}.states"), shared=False, size=self.layers * total * D,
                                 dtype=act).reshape(self.layers, total, D)
        case = {"prefill": [], "verify": [], "update": []}
        for index in range(self.layers):
            ours = states[index].to(self.device)
            expected = (self.final if index == self.layers - 1 else self.forced[index])[:total]
            case["prefill"].append(error(ours[:prompt], expected[:prompt]))
            case["verify"].append(error(ours[prompt:], expected[prompt:]))
            if index < self.layers - 1:  # of what the layer adds to its input
                before = self.inputs[index][:total].float()
                case["update"].append(error(ours.float() - before, expected - before))
        case["taps"] = max(max(case["prefill"][i], case["verify"][i]) for i in taps)

        head = random_tensor("target", "lm_head.weight", target_shapes(self.config)["lm_head.weight"], self.args.seed,
                             self.device)
        expected = self.final[prompt - 1 : total] @ head.float().T
        logits = self.load(f"forced_{prompt}.logits", torch.float32, [1 + self.block, self.config["vocab_size"]])
        case["logits"] = error(logits, expected)
        case["same_argmax"] = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()

        drafter = PlainDrafter(self.draft_config)
        narrow = self.weights("drafter", drafter_shapes(self.draft_config))
        wide = {name: tensor.float() for name, tensor in narrow.items()}
        tapped = torch.cat([self.inputs[i + 1][:prompt] for i in taps], -1)
        block_rows = self.mask_row.expand(self.block, -1).clone()
        block_rows[0] = self.token_rows[prompt]
        features = drafter.features(wide, tapped.float())
        draft_logits = drafter.block(wide, features, block_rows.float())[1:] @ head.float().T
        plain = drafter.block(narrow, drafter.features(narrow, tapped), block_rows)[1:] @ head.T
        ours = self.load(f"forced_{prompt}.draft_logits", torch.float32, list(draft_logits.shape))
        case["features"] = error(self.load(f"forced_{prompt}.features", act, [prompt, D]), features)
        case["draft_logits"] = error(ours, draft_logits)
        case["plain_draft_logits"] = error(plain, draft_logits)
        case["same_draft_argmax"] = (ours.argmax(-1) == draft_logits.argmax(-1)).float().mean().item()
        if any(kind == "sliding_attention" for kind in self.draft_config["layer_types"]):
            # How far off a window that counts one key more would be: the comparison must be able to see it.
            wrong = PlainDrafter({**self.draft_config, "sliding_window": self.draft_config["sliding_window"] + 1})
            case["window_off_by_one"] = error(wrong.block(wide, features, block_rows.float())[1:] @ head.float().T, draft_logits)
            full = PlainDrafter({**self.draft_config, "sliding_window": prompt + self.block})
            case["window_dropped"] = error(full.block(wide, features, block_rows.float())[1:] @ head.float().T, draft_logits)
        return case

    def compare(self):
        with open(self.path("info.json")) as file:
            info = json.load(file)
        act = {"BF16": torch.bfloat16, "F32": torch.float32}[info["activation"]]
        for prompt in self.prefills:
            self.results["cases"][prompt] = self.compare_case(prompt, act)
            self.log(f"compared the prompt of {prompt}")
        total, D = self.free + self.block, self.config["hidden_size"]
        states = torch.from_file(self.path(f"free_{self.free}.states"), shared=False, size=self.layers * total * D,
                                 dtype=act).reshape(self.layers, total, D)
        ours = [error(states[i].to(self.device), self.free_states[i]) for i in range(self.layers - 1)]
        self.results.update(info=info, free={"ours": ours, "library": self.library_free},
                            library_forced=self.library_forced, second_opinion=self.second_errors)

    def report(self):
        r = self.results
        failures = []
        bar = LAYER_BARS[r["info"]["activation"]]

        def check(ok, what):
            if not ok:
                failures.append(what)

        print(f"\nTeacher-forced, relative L2, worst of {self.layers} layers ({self.args.reference} float32 is the reference; "
              f"{r['equal_checksums']} tensors with equal checksums)")
        print("prompt  prefill   verify    update    taps      logits    features  draft     plain bf16  same argmax (target, draft)")
        for prompt, case in r["cases"].items():
            layers = max(case["prefill"] + case["verify"])
            print(f"{prompt:6}  {max(case['prefill']):.2e}  {max(case['verify']):.2e}  {max(case['update']):.2e}  {case['taps']:.2e}  "
                  f"{case['logits']:.2e}  {case['features']:.2e}  {case['draft_logits']:.2e}  {case['plain_draft_logits']:.2e}    "
                  f"{case['same_argmax']:.3f}, {case['same_draft_argmax']:.3f}"
                  + (f"  (window off by one: {case['window_off_by_one']:.1e}, dropped: {case['window_dropped']:.1e})" if "window_off_by_one" in case else ""))
            check(layers <= bar, f"prompt {prompt}: a layer is off by {layers:.2e}")
            for name in ("taps", "logits", "features", "draft_logits"):
                check(case[name] <= bar, f"prompt {prompt}: {name} off by {case[name]:.2e}")
        print(f"reference in bfloat16, teacher-forced: worst layer {max(r['library_forced']):.2e}")
        if r["second_opinion"]:
            print(f"plain_models.py in float32: worst layer {max(r['second_opinion']):.2e}")
        print(f"Free-running over a prompt of {self.free}: error against float32")
        print("layers  ours      reference bf16  ratio")
        for count in sorted({1, 2, 4, min(FREE_LAYERS, self.layers - 1), self.layers // 2, self.layers - 1}):
            ours, library = r["free"]["ours"][count - 1], r["free"]["library"][count - 1]
            print(f"{count:6}  {ours:.2e}  {library:.2e}        {ours / library:.3f}")
            if count == FREE_LAYERS:
                check(ours <= FREE_BAR * library, f"{count} layers free: {ours / library:.3f} x the reference's error")
        with open(self.args.json, "w") as file:
            json.dump(r, file, indent=1)
        for failure in failures:
            print("MISSED", failure)
        print("all bars met" if not failures else f"{len(failures)} bars missed")
        return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--folder", required=True, help="for the exchange: some gigabytes, best in memory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefills", default="1,17,1000,2040,3000")
    parser.add_argument("--free-prefill", default="1000")
    parser.add_argument("--chunk", default="1024")
    parser.add_argument("--draft-window", type=int,
                        help="another sliding window of the drafter: with a short one, an edge off by one is plain to see")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--reference", default="transformers", choices=["transformers", "plain"])
    parser.add_argument("--second-opinion", action="store_true", help="also compare plain_models.py with the reference")
    parser.add_argument("--json", default="/dev/null")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    comparison = Comparison(args)
    with torch.no_grad():
        comparison.compare_checksums()
        comparison.run_reference()
        comparison.run_program("--prefills", args.prefills, "--free-prefills", args.free_prefill, "--chunk", args.chunk)
        comparison.compare()
    sys.exit(comparison.report())


if __name__ == "__main__":
    main()
