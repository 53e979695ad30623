#!/usr/bin/env python3
"""Writes nf4.json: a matrix in NF4 by bitsandbytes on a CPU, with and without double quantization."""
import json
import pathlib

import bitsandbytes.functional as bnb
import torch

ROWS, COLUMNS = 27, 704


def main():
    torch.manual_seed(20261130)
    weight = torch.randn(ROWS, COLUMNS) * torch.rand(ROWS, 1) * 0.1
    weight[3, 64:128] = 0.0
    weight[5, 7] = 3.0
    weight = weight.bfloat16().float()
    result = {"rows": ROWS, "columns": COLUMNS, "weight": [int(bits) for bits in (weight.view(torch.int32) >> 16).flatten()]}
    for name, nested in [("single", False), ("nested", True)]:
        codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        case = {"codes": bytes(codes.flatten().tolist()).hex()}
        if nested:
            case |= {
                "absmax": bytes(state.absmax.tolist()).hex(),
                "nested_absmax": state.state2.absmax.view(torch.int32).tolist(),
                "offset": state.offset.view(torch.int32).item(),
            }
        else:
            case["absmax"] = state.absmax.view(torch.int32).tolist()
        decoded = bnb.dequantize_4bit(codes, state)
        # Enough to tell whether every element is right: their bits, added up per row.
        bits = decoded.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        case["decoded_bits"] = [int(row.sum()) for row in bits]
        result[name] = case
    pathlib.Path(__file__).with_name("nf4.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
