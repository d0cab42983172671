"""Random weights with the bits of `dflash-worker --random-weights` (docs/spec/random-weights.md), made with PyTorch.

As a program: prints the checksum of each named tensor.
    random_weights.py SEED target|drafter NAME ROWS,COLS [NAME ROWS,COLS ...]
"""

import math
import sys

import torch

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
ONE = 1 << 32


def mix(z):
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def signed(z):
    """The same 64 bits as the number that an int64 tensor holds."""
    return z - (1 << 64) if z >> 63 else z


def fnv1a64(text):
    value = 0xCBF29CE484222325
    for byte in text.encode("ascii"):
        value = (value ^ byte) * 0x100000001B3 & MASK
    return value


def key_of(role, name, seed):
    return mix((fnv1a64(role + "." + name) + mix((seed + GOLDEN) & MASK)) & MASK)


def scale_of(role, name, shape):
    """(centre, multiplier)"""

    def multiplier(p, q):
        return math.isqrt(3 * p * ONE // q)

    if name.endswith("norm.weight"):
        one_plus = role == "target" and not name.endswith("linear_attn.norm.weight")
        return (0 if one_plus else ONE), multiplier(1, 256)
    if name.endswith("A_log"):
        return 3 * ONE // 2, multiplier(1, 4)
    if name.endswith("dt_bias"):
        return -4 * ONE, multiplier(1, 1)
    if name == "embed_tokens.weight":
        return 0, multiplier(1, 1)
    if name == "lm_head.weight":
        return 0, multiplier(4, shape[-1])
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return 0, multiplier(1, 4 * shape[-1])
    return 0, multiplier(1, shape[-1])


def _shift(z, bits):
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # logical


def _mix(z):
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def random_tensor(role, name, shape, seed, device="cpu", chunk=1 << 25):
    """A bfloat16 tensor of that shape."""
    centre, multiplier = scale_of(role, name, shape)
    key = key_of(role, name, seed)
    count = math.prod(shape)
    flat = torch.empty(count, dtype=torch.bfloat16, device=device)
    for first in range(0, count, chunk):
        last = min(count, first + chunk)
        index = torch.arange(first + 1, last + 1, dtype=torch.int64, device=device)
        z = _mix(index * signed(GOLDEN) + signed(key))
        noise = (z & 0xFFFF) + ((z >> 16) & 0xFFFF) + ((z >> 32) & 0xFFFF) + _shift(z, 48) - 131070
        flat[first:last] = ((noise * multiplier + centre).to(torch.float32) * 2.0**-32).to(torch.bfloat16)
    return flat.reshape(shape)


def checksum(tensor, chunk=1 << 25):
    bits = tensor.contiguous().view(torch.int16).reshape(-1)
    total = 0
    for first in range(0, bits.numel(), chunk):
        part = bits[first : first + chunk].to(torch.int64) & 0xFFFF
        index = torch.arange(first, first + part.numel(), dtype=torch.int64, device=bits.device)
        total = (total + int(((part + 1) * (2 * index + 1)).sum().item())) & MASK
    return total


def main():
    seed, role, rest = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for name, shape in zip(rest[::2], rest[1::2]):
        tensor = random_tensor(role, name, [int(size) for size in shape.split(",")], seed)
        print(f"{checksum(tensor):016x} {name}")


if __name__ == "__main__":
    main()
