"""States of optimizers with moments of 8 bits, which an audit refuses: python eight_bit.py. See README.md."""

import bitsandbytes
import torch
import torchao.optim

import common

KINDS = {"bitsandbytes": (bitsandbytes.optim.AdamW8bit, {"min_8bit_size": 0}), "torchao": (torchao.optim.AdamW8bit, {})}

if __name__ == "__main__":
    folder = common.fresh("eight-bit")
    for name, (kind, settings) in KINDS.items():
        model = torch.nn.Linear(64, 64, bias=False)  # torchao leaves smaller moments as they are
        optimizer = kind(model.parameters(), lr=common.LR, **settings)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{name}.pt")
