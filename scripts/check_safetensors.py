"""Compares which safetensors headers `fsdp` and the safetensors library read, and as what, on random and odd ones.

    python scripts/check_safetensors.py target/release/fsdp [COUNT]

Requires safetensors 0.7 or later. Three kinds of headers are refused here on purpose, although the library reads them (see
docs/checkpoints.md): names that are given twice, rows that end within a byte, and more than 64 dimensions.
"""

import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

from safetensors import SafetensorError, deserialize

BITS = {"BOOL": 8, "U8": 8, "I16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F4": 4, "F6_E2M3": 6}
SPACES = ["", " ", "\n", "\t\r\n  ", " " * 40, "\v", "\f", "\0", "\ufeff", "x"]
METADATA = ['{}', 'null', '{"a":"1"}', '{"a":1}', '{"a":null}', '[]', '"x"', '{"a":{}}', '{"\\u0061":"\\n"}']
FIELDS = ['"x":1', '"x":[[]]', '"y":{"dtype":"F32"}', '"":null', '"Dtype":"F64"', '"x":-1.5e300']
SIZES = [0, 0, 1, 1, 2, 3, 4, 8, 1 << 31, 1 << 62, (1 << 64) - 1, 1 << 64, -1, 1.0, "1", None]
NAMES = ["a", "b", "w.0", "", "\u00e9", "\u0000", '"', "__metadata_", "\U0001f600"]


def header(rng):
    """The text of a header, the number of bytes of its data, and whether it is one of those refused on purpose."""
    entries, at, is_refused = [], 0, False
    for name in rng.sample(NAMES, rng.randrange(4)):
        dtype = rng.choice(list(BITS)) if rng.random() < 0.97 else rng.choice(["f32", "F7", "U4", "", "TF32"])
        odd = rng.random() < 0.25
        shape = [rng.choice(SIZES if odd else SIZES[:8]) for _ in range(rng.randrange(4))]
        elements = 1
        for size in shape:
            elements *= size if isinstance(size, int) else 1
        length = max(0, elements * BITS.get(dtype, 8) // 8) % (1 << 16)
        group = {"F4": 2, "F6_E2M3": 4}.get(dtype, 1)
        is_refused |= group > 1 and (not shape or not isinstance(shape[-1], int) or shape[-1] % group != 0)
        begin = at + (rng.choice([1, -1, 4]) if rng.random() < 0.05 else 0)
        end = begin + length + (rng.choice([1, -1, 8]) if rng.random() < 0.05 else 0)
        at = max(at, end)
        fields = [f'"dtype":{json.dumps(dtype)}', f'"shape":{json.dumps(shape)}', f'"data_offsets":[{begin},{end}]']
        if rng.random() < 0.05:
            fields.pop(rng.randrange(3))
        if rng.random() < 0.2:
            fields.append(rng.choice(FIELDS))
        rng.shuffle(fields)
        entries.append(json.dumps(name, ensure_ascii=rng.random() < 0.5) + ":{" + ",".join(fields) + "}")
    if rng.random() < 0.3:
        entries.append('"__metadata__":' + rng.choice(METADATA))
    rng.shuffle(entries)
    separator = rng.choice([",", ",", ", ", ",\n", ",,"]) if rng.random() < 0.3 else ","
    around = [rng.choice(SPACES) if rng.random() < 0.3 else "" for _ in range(2)]
    return around[0] + "{" + separator.join(entries) + "}" + around[1], at, is_refused


def file(rng):
    text, length, is_refused = header(rng)
    text = text.encode()
    if rng.random() < 0.03:
        text = text.replace(b"a", b"\xff", 1)
    size = len(text) + (rng.choice([-1, 1, 1 << 40, 1 << 63]) if rng.random() < 0.04 else 0)
    length = max(0, length + (rng.choice([-1, 1]) if rng.random() < 0.05 else 0))
    return struct.pack("<Q", size % (1 << 64)) + text + bytes(length), is_refused


def library(content):
    try:
        tensors = deserialize(content)
    except SafetensorError:
        return None
    return sorted((name, tensor["dtype"], tensor["shape"]) for name, tensor in tensors)


def ours(fsdp, path):
    ran = subprocess.run([fsdp, "ckpt", "inspect", path, "--tensors", "--json"], capture_output=True, text=True)
    if ran.returncode not in (0, 2):
        raise SystemExit(f"{path}: exit code {ran.returncode}\n{ran.stderr}")
    if ran.returncode:
        return None
    return sorted((tensor["name"], tensor["dtype"], tensor["shape"]) for tensor in json.loads(ran.stdout)["tensors"])


def main():
    fsdp, count = sys.argv[1], int((sys.argv[2:] or ["600"])[0])
    kept = pathlib.Path(tempfile.mkdtemp())
    read = refused = different = 0
    for seed in range(count):
        content, is_refused = file(random.Random(seed))
        path = kept / f"{seed}.safetensors"
        path.write_bytes(content)
        expected, got = library(content), ours(fsdp, path)
        if expected == got or (got is None and is_refused):
            read, refused = read + (got is not None), refused + (got is None)
            path.unlink()
            continue
        different += 1
        print(f"{path}: the library reads {expected}, fsdp {got}: {content[8:300]}")
    print(f"{count} headers: {read} read, {refused} refused, {different} different")
    raise SystemExit(different > 0)


if __name__ == "__main__":
    main()
