#!/usr/bin/env python3
"""Does vLLM take exports of all families, every weight of them? Nothing is computed: that would take its compiled kernels.

usage: python scripts/check_vllm.py FSDP [CASE ..]      (vllm 0.33, and what check_models.py needs)

For each folder of `tests/golden/families` (or those that are named): `fsdp train` takes two steps from its weights and exports the
result. vLLM reads the configuration, builds its own model of that and loads the weights into it. Then it must have filled all of its
parameters, and these must have the elements of the file: it packs, splits and transposes tensors, and pads with zeros, so the elements are
compared in order of their values, without zeros.
"""

import argparse
import os
import pathlib
import re
import sys
import tempfile

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

import torch  # noqa: E402
from check_models import GOLDEN, train  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402


# vLLM needs its kernels to build GPT-2 and mixtures, and has no sliding windows in some of the layers only (as this `qwen2`).
LEFT_OUT = re.compile("gpt2-.*|(mixtral|qwen3_moe).*|qwen2")


def export(fsdp, case, folder):
    """Trains two steps; returns the folder of the model."""
    folder.mkdir()
    ids = load_file(GOLDEN / case / "expected.safetensors")["ids"]
    data = folder / "data"
    data.mkdir()
    for row, tokens in enumerate(ids):
        (data / f"{row}.bin").write_bytes(tokens.numpy().astype("<u2").tobytes())
    train(fsdp, folder, GOLDEN / case, data, 2, "run")
    return folder / "run/model"


def load(model, meeting):
    """vLLM's model of an export, and the names of the parameters that it has filled. Its world of one meets at a file that stays."""
    engine = EngineArgs(model=str(model), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=16)
    config = engine.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        # Groups of experts are made for models that have some.
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        theirs = initialize_model(vllm_config=config)
        weights = DefaultModelLoader(config.load_config).get_all_weights(config.model_config, theirs)
        return theirs, theirs.load_weights(weights)


def elements(tensors):
    joined = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
    return joined[joined != 0].sort().values


def check(model, meeting):
    """What one export came to, and whether that is right."""
    try:
        theirs, filled = load(model, meeting)
    except Exception as error:  # noqa: BLE001 Any of vLLM's.
        return f"{type(error).__name__}: {error}", False
    ours, parameters = load_file(model / "model.safetensors"), dict(theirs.named_parameters())
    unfilled = sorted(parameters.keys() - filled)
    is_equal = torch.equal(elements(ours.values()), elements(parameters.values()))
    told = f"not filled: {unfilled}" if unfilled else "all filled"
    return f"{len(ours)} tensors, {told}, elements {'equal' if is_equal else 'differ'}", is_equal and not unfilled


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    known = sorted(folder.name for folder in GOLDEN.iterdir())
    cases = arguments.cases or [case for case in known if not LEFT_OUT.fullmatch(case)]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        # All of them first: vLLM sets the variables of a launcher in this process.
        models = {case: export(arguments.fsdp, case, pathlib.Path(folder, case)) for case in cases}
        for case, model in models.items():
            told, is_right = check(model, pathlib.Path(folder, "meeting"))
            print(f"{case}: {told}"[:600], flush=True)
            if not is_right:
                failed.append(case)
    if failed:
        sys.exit(f"wrong: {', '.join(failed)}")


if __name__ == "__main__":
    main()
