#!/usr/bin/env python3
"""Writes `cases.json`: small tokenizers, the files next to them, and the ids that transformers' AutoTokenizer gives.

    pip install transformers==5.17.0 tokenizers==0.23.3
    HF_HUB_OFFLINE=1 python make.py
"""

import json
import pathlib
import tempfile

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
CORPUS = ["Hello my friend how are you fine word snow man user Hi end leading space two spaces 2024"] * 30
TEXTS = [
    "Hello my friend <s>how are you</s> fine",
    " leading space",
    "  two  spaces ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "x<NEW>y <NEW> z  <NEW>  end",
    "snow\u2603man \U0001f600 caf\u00e9 cafe\u0301 \u4e2d\u6587",
    "tab\tnl\n\n\nend 1234 it's",
    "word<w>word <w> word",
    "<|endoftext|> <unk> <pad> <bos>Hello<eos> <mask>",
    "a" * 20,
    "\u00a0nbsp\u2009thin\u200bzw",
]


def special(*names):
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False))
    return made


def pieces():
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in model["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(special("<unk>", "<s>", "</s>"))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return made


def with_tokens(made, *tokens):
    made.add_tokens(list(tokens))
    return made


def unigram():
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, show_progress=False, special_tokens=names, unk_token="<unk>")
    made.train_from_iterator(CORPUS, trainer)
    return made


NEW = AddedToken("<NEW>", special=True, normalized=False)
TOKENIZERS = {
    "bytes": byte_level(),
    "bytes with tokens": with_tokens(byte_level(), NEW, AddedToken("<w>", single_word=True)),
    "pieces": pieces(),
    "unigram": unigram(),
}


def token(content, **flags):
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


DECODER = {
    "291": token("<NEW>", lstrip=True, rstrip=True, special=False),
    "290": token("<|im_start|>"),
    "400": token("<|im_end|>"),
    "7": token("<w>", single_word=True, special=False, normalized=True),
}
OLD = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "normalized": True, "rstrip": True, "single_word": False}
CONFIG = "tokenizer_config.json"


def config(**fields):
    return {CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast", **fields}}


def of_class(name, model_type=None, **fields):
    files = config(tokenizer_class=name, **fields)
    return files | ({"config.json": {"model_type": model_type}} if model_type else {})


CASES = [
    ("bytes", {}),
    ("bytes", config()),
    ("bytes", config(added_tokens_decoder=DECODER)),
    ("bytes", config(added_tokens_decoder=DECODER, eos_token="<|im_end|>", bos_token="<NEW>", pad_token="<pad>")),
    ("bytes", config(eos_token=OLD, additional_special_tokens=["<NEW>", "<w>"])),
    ("bytes", config(extra_special_tokens={"image_token": "<NEW>"}, video_token="<w>", unk_token=None)),
    ("bytes", config(video_token={"content": "<NEW>", "lstrip": True}, eos_token="<w>")),
    ("bytes", config(image_token="<NEW>", video_token={**OLD, "content": "<w>"}, audio_token={"__type": "Other", "content": "<pad>"})),
    ("bytes", config(added_tokens_decoder={}, video_token={"content": "<NEW>"}, model_specific_special_tokens={"audio_token": "<w>"})),
    ("bytes", config() | {"special_tokens_map.json": {"video_token": {"content": "<NEW>", "rstrip": True}, "image_token": ["<w>"]}}),
    ("bytes with tokens", of_class("Qwen2Tokenizer", "qwen2", video_token={"content": "<unk>"}, image_token={**OLD, "content": "<pad>"})),
    ("pieces", of_class("LlamaTokenizer", "llama", video_token={"content": "<NEW>"}, image_token="<w>")),
    ("bytes", config() | {"added_tokens.json": {"<NEW>": 291, "<|im_start|>": 290}}),
    ("bytes", config(eos_token="<NEW>") | {"added_tokens.json": {"<NEW>": 290, "<w>": 291}}),
    ("bytes", config(added_tokens_decoder=DECODER) | {"added_tokens.json": {"<pad>": 290}}),
    ("bytes", config() | {"special_tokens_map.json": {"eos_token": token("<|im_end|>", lstrip=True), "extra_special_tokens": ["<w>"]}}),
    ("bytes", config(additional_special_tokens=["<w>"]) | {"special_tokens_map.json": {"additional_special_tokens": ["<NEW>"]}}),
    ("bytes", config(add_prefix_space=True, do_lower_case=True, add_bos_token=True, bos_token="<s>")),
    ("bytes", config(split_special_tokens=True, eos_token="<|im_end|>")),
    ("bytes with tokens", config(split_special_tokens=True)),
    ("bytes with tokens", config(added_tokens_decoder={"290": token("<NEW>", lstrip=True, rstrip=True)})),
    ("bytes with tokens", config(eos_token="<w>")),
    ("bytes with tokens", of_class("GPT2Tokenizer", "gpt2", added_tokens_decoder={"290": token("<|endoftext|>", rstrip=True)})),
    ("bytes with tokens", of_class("GPT2TokenizerFast", "starcoder2")),
    ("bytes with tokens", of_class("GPT2TokenizerFast", add_prefix_space=True, bos_token=None)),
    ("bytes", of_class("GPTNeoXTokenizerFast", "gpt_neox", eos_token="<|im_end|>")),
    ("bytes with tokens", of_class("GPTNeoXTokenizer", add_prefix_space=True)),
    ("bytes with tokens", of_class("Qwen2Tokenizer", "qwen2", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])),
    ("bytes with tokens", of_class("Qwen2TokenizerFast", "qwen3", added_tokens_decoder={"290": token("<|endoftext|>", lstrip=True)})),
    ("bytes with tokens", of_class("LlamaTokenizerFast", "qwen2")),
    ("bytes with tokens", of_class("PreTrainedTokenizerFast", "qwen3_moe")),
    ("bytes", of_class("Qwen3_5Tokenizer", "qwen3_5")),
    ("bytes", {"config.json": {"model_type": "qwen3"}}),
    ("pieces", config()),
    ("pieces", of_class("LlamaTokenizer", "llama", legacy=True)),
    ("pieces", of_class("LlamaTokenizerFast", "smollm3", legacy=False, bos_token="<s>", eos_token="</s>")),
    ("pieces", of_class("LlamaTokenizerFast", add_prefix_space=False, added_tokens_decoder={"1": token("<s>", rstrip=True)})),
    ("pieces", of_class("LlamaTokenizerFast", "mistral", legacy=True)),
    ("pieces", of_class("LlamaTokenizer", "phi3", added_tokens_decoder={"2": token("</s>", rstrip=True, special=False)})),
    ("pieces", of_class("GemmaTokenizerFast", "gemma2")),
    ("pieces", of_class("GemmaTokenizer", "gemma3_text", unk_token="<unk>", pad_token="<pad>")),
    ("pieces", of_class("GPT2Tokenizer", "granite")),
    ("pieces", of_class("GPTNeoXTokenizer", "olmo2")),
    ("unigram", config(added_tokens_decoder={"60": token("<NEW>")})),
    ("unigram", config(tokenizer_class="OwnTokenizer")),
]


def ids(tokenizer, files):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {"tokenizer.json": json.loads(tokenizer.to_str()), **files}.items():
            pathlib.Path(folder, name).write_text(json.dumps(content))
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        whole = [loaded(text)["input_ids"] for text in TEXTS]
        inside = [loaded(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        return {"size": len(loaded), "eos": loaded.eos_token, "whole": whole, "inside": inside}


def main():
    cases = [{"tokenizer": name, "files": files, **ids(TOKENIZERS[name], files)} for name, files in CASES]
    named = {name: json.loads(made.to_str()) for name, made in TOKENIZERS.items()}
    parts = {"texts": TEXTS, "tokenizers": named}
    lines = [f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in parts.items()]
    rows = ",\n".join(json.dumps(case) for case in cases)
    (HERE / "cases.json").write_text("{" + ",\n".join(lines) + f',\n"cases": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
