#!/usr/bin/env python3
"""What a golden bundle (docs/golden-bundle.md) says about the files of a pair: fingerprints and digests of all tensors,
and how the drafter's configuration has to be read. Standard library only.

As a program it writes these parts of an existing bundle anew:
    tools/reference/checkpoint_files.py --model MODEL --draft-model DRAFTER BUNDLE
"""

import argparse
import hashlib
import json
import os
import struct
import sys

FORMAT = "dflash-golden-2"
SAMPLE_BYTES = 4096
SAMPLES = 4
BLOCK_BYTES = 1 << 26  # that are read at a time
SKIPPED = ("model.visual.", "mtp.")  # parts of the target that no drafter sees


class Tensors:
    """Tensors of a folder by canonical name, read when they are asked for."""

    def __init__(self, folder):
        self.tensors = {}
        index = os.path.join(folder, "model.safetensors.index.json")
        files = ["model.safetensors"]
        if os.path.exists(index):
            with open(index) as file:
                files = sorted(set(json.load(file)["weight_map"].values()))
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
            for tensor, entry in header.items():
                if tensor == "__metadata__":
                    continue
                canonical = tensor
                for prefix in ("model.language_model.", "model."):
                    if tensor.startswith(prefix):
                        canonical = tensor[len(prefix):]
                        break
                self.tensors[canonical] = (path, 8 + size, entry, tensor.startswith(SKIPPED))

    def read(self, name, offset, size):
        path, base, entry, _ = self.tensors[name]
        with open(path, "rb") as file:
            file.seek(base + entry["data_offsets"][0] + offset)
            return file.read(size)

    def size(self, name):
        begin, end = self.tensors[name][2]["data_offsets"]
        return end - begin

    def sample(self, name):
        """All of a small tensor; of a large one both ends and two runs between (worker/model/checkpoint.h)."""
        size = self.size(name)
        if size <= SAMPLES * SAMPLE_BYTES:
            return self.read(name, 0, size)
        offsets = [i * ((size - SAMPLE_BYTES) // (SAMPLES - 1)) // SAMPLE_BYTES * SAMPLE_BYTES for i in range(SAMPLES - 1)]
        return b"".join(self.read(name, offset, SAMPLE_BYTES) for offset in offsets + [size - SAMPLE_BYTES])

    def names(self):
        return sorted(name for name, entry in self.tensors.items() if not entry[3])

    def digests(self):
        """Of all bytes."""
        digests = {}
        for name in self.names():
            digest, size = hashlib.sha256(), self.size(name)
            for offset in range(0, size, BLOCK_BYTES):
                digest.update(self.read(name, offset, min(BLOCK_BYTES, size - offset)))
            digests[name] = digest.hexdigest()
        return digests

    def fingerprints(self):
        fingerprints = {}
        for name in self.names():
            sample = self.sample(name)
            fingerprints[name] = hashlib.sha256(struct.pack("<Q", len(sample)) + sample).hexdigest()
        return fingerprints


def read_contract(config):
    nested = config.get("dflash_config") or {}

    def either(key):
        value = nested.get(key, config.get(key))
        if value is None:
            sys.exit(f"config.json of the drafter has no {key}")
        return value

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        sys.exit("config.json of the drafter has no rope_theta")
    is_causal = nested.get("causal", config.get("is_causal"))
    layers = []
    for kind in layer_types(config):
        sliding = kind == "sliding_attention"
        layers.append({"kind": kind, "window": config["sliding_window"] if sliding else 0,
                       "causal": sliding if is_causal is None else is_causal})
    return {"target_layer_ids": either("target_layer_ids"), "mask_token_id": either("mask_token_id"),
            "block_size": either("block_size"), "rope_theta": float(theta), "rotary_fraction": 1.0,
            "rms_norm_eps": config["rms_norm_eps"], "layers": layers}


def layer_types(config):
    return config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]


def parts_of_bundle(model, draft_model):
    with open(os.path.join(draft_model, "config.json")) as file:
        contract = read_contract(json.load(file))
    target, drafter = Tensors(model), Tensors(draft_model)
    return {"format": FORMAT, "target_weights": target.fingerprints(), "drafter_weights": drafter.fingerprints(),
            "target_digests": target.digests(), "drafter_digests": drafter.digests(), "contract": contract}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("bundle", help="folder")
    args = parser.parse_args()
    path = os.path.join(args.bundle, "bundle.json")
    with open(path) as file:
        bundle = json.load(file)
    bundle.update(parts_of_bundle(args.model, args.draft_model))
    with open(path, "w") as file:
        json.dump(bundle, file, indent=1)
        file.write("\n")
