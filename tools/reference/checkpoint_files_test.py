"""checkpoint_files.py on the small pair, on tensors of all sizes, and on configurations as they come."""

import hashlib
import json
import os
import struct
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import checkpoint_files  # noqa: E402

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


class Test(unittest.TestCase):
    def test_the_golden_bundle_has_what_this_writes(self):
        with open(os.path.join(ROOT, "tests/golden/bundle.json")) as file:
            bundle = json.load(file)
        parts = checkpoint_files.parts_of_bundle(os.path.join(ROOT, "models/tiny-qwen3.6"),
                                                 os.path.join(ROOT, "models/tiny-qwen3.6-dflash"))
        self.assertEqual(parts, {key: bundle[key] for key in parts})

    def test_large_tensors_are_sampled(self):
        for size, offsets in ((16384, None), (16386, [0, 4096, 8192, 12290]), (100000, [0, 28672, 61440, 95904])):
            data = bytes(i * 31 % 251 for i in range(size))
            header = json.dumps({"model.x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
                                 "mtp.x": {"dtype": "U8", "shape": [0], "data_offsets": [size, size]}}).encode()
            with tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, "model.safetensors"), "wb") as file:
                    file.write(struct.pack("<Q", len(header)) + header + data)
                fingerprints = checkpoint_files.Tensors(folder).fingerprints()
                digests = checkpoint_files.Tensors(folder).digests()
            sample = data if offsets is None else b"".join(data[at:at + 4096] for at in offsets)
            self.assertEqual(fingerprints, {"x": hashlib.sha256(struct.pack("<Q", len(sample)) + sample).hexdigest()})
            self.assertEqual(digests, {"x": hashlib.sha256(data).hexdigest()})

    def test_layer_types_may_be_absent(self):
        config = {"target_layer_ids": [1], "mask_token_id": 2, "block_size": 4, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
                  "num_hidden_layers": 2}
        self.assertEqual(checkpoint_files.read_contract(config)["layers"],
                         [{"kind": "full_attention", "window": 0, "causal": False}] * 2)
        self.assertEqual(checkpoint_files.layer_types(config), ["full_attention"] * 2)


if __name__ == "__main__":
    unittest.main()
