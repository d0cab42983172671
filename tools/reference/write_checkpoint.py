#!/usr/bin/env python3
"""Writes a checkpoint of the random weights of docs/spec/random-weights.md: one safetensors file in a new folder that
links to the other files of the configuration's folder. For measurements of loading.

    write_checkpoint.py CONFIG_FOLDER NEW_FOLDER [SEED [DEVICE]]
"""

import json
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from compare_real_shapes import target_shapes  # noqa: E402
from random_weights import random_tensor  # noqa: E402


def main():
    source, folder = sys.argv[1], sys.argv[2]
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    with open(os.path.join(source, "config.json")) as file:
        config = json.load(file)
    config = config.get("text_config", config)
    shapes = target_shapes(config)
    for index in range(config["num_hidden_layers"]):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in target_shapes(config, index).items()})
    header, offset = {}, 0
    for name, shape in shapes.items():
        count = 2
        for size in shape:
            count *= size
        stored = name if name == "lm_head.weight" else "model.language_model." + name
        header[stored] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + count]}
        offset += count
    os.makedirs(folder)
    for name in os.listdir(source):
        os.symlink(os.path.abspath(os.path.join(source, name)), os.path.join(folder, name))
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = random_tensor("target", name, shape, seed, device)
            file.write(tensor.view(torch.int16).cpu().numpy().data)
    print(f"{offset / 1e9:.2f} GB in {folder}")


if __name__ == "__main__":
    main()
