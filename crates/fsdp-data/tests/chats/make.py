#!/usr/bin/env python3
"""Writes what the tests of chats and tokenizers compare with: `renderings.json`, `tokens.json`, `marked.json` and the tokenizers here.

    pip install transformers==5.17.0 tokenizers==0.23.3 jinja2
    python make.py

The templates are this project's own, written to use what those of published models use.
"""

import datetime
import json
import pathlib

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
DAY = (2024, 7, 26)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(*DAY)


chat_template_utils.datetime = Clock

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city, in °C: <now> & 'later'.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "number", "default": 1.0, "minimum": 1e-05}},
            "required": ["city"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2, "now": True}}}
    ],
}


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(content):
    return {"role": "tool", "name": "weather", "content": content}


CONVERSATIONS = {
    "one turn": [user("Who are you?"), assistant("A test.")],
    "several turns": [
        system("Be brief. "),
        user(" What is 2 + 2? "),
        assistant(" It is 4.\n"),
        user("And 3 + 3?"),
        assistant("6"),
    ],
    "a question at the end": [user("Hi"), assistant("Hello!"), user("How are you?")],
    "reasoning in the text": [
        user("Hi"),
        assistant("<think>\nA greeting.\n</think>\n\nHello!"),
        user("Why?"),
        assistant("<think>\nHm.\n</think>\n\nBecause."),
    ],
    "reasoning beside the text": [user("Hi"), assistant("Hello!", reasoning_content="A greeting.")],
    "content in parts": [
        system([{"type": "text", "text": "Be kind."}]),
        user([{"type": "text", "text": " Hi "}, {"type": "image"}, {"type": "text", "text": "there"}]),
        assistant([{"type": "text", "text": "Hello!"}]),
    ],
    "tools": [user("Sun tomorrow?"), CALL, tool('{"sun": 7.5}'), tool("fine"), assistant("Yes.")],
    "a tool that answers with an object": [user("Sun?"), CALL, tool({"sun": 7.5, "rain": None}), assistant("Yes.")],
    "roles that do not alternate": [user("a"), user("b")],
    "an answer first": [assistant("a"), user("b")],
    "letters": [user("日本語 🎉 \u00a0\u2028 'quoted' \"twice\" \\ \t"), assistant("naïve\nlines\r\n")],
    "nothing said": [user(""), assistant("")],
    "a stop": [user("Hi"), assistant("Hello!"), {"role": "stop", "content": ""}, user("more")],
}
VALUES = {
    "values": [
        {"role": "user", "content": content, "name": None}
        for content in [
            None,
            True,
            0,
            -1.0,
            1e16,
            1e-07,
            123456789.125,
            "it's",
            'both \' and "',
            [],
            {},
            [1, [2.5, None], {"b": "é\n\x1f", "a": [False]}],
            {"z": 1, "a": {"é": "<\u00ad\u007f>"}},
        ]
    ]
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def rendering(template, name, messages, options):
    case = {"template": template, "conversation": name, "messages": messages, "options": options}
    source = (HERE / "templates" / f"{template}.jinja").read_text()
    given = {**SPECIAL, **options}
    tools, prompt = given.pop("tools", None), given.pop("add_generation_prompt", False)
    try:
        texts, generated = chat_template_utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=template == "generation",
            **given,
        )
    except Exception as fault:  # What Jinja says of a template that fails is not compared, what a template raises is.
        raised = type(fault).__name__ == "TemplateError"
        return {**case, "raised": str(fault)} if raised else {**case, "failed": str(fault)}
    text = texts[0]
    spans = [[len(text[:start].encode()), len(text[:end].encode())] for start, end in (generated or [[]])[0]]
    return {**case, "text": text, "generated": spans}


def renderings():
    cases = []
    for path in sorted((HERE / "templates").glob("*.jinja")):
        if path.stem == "values":
            cases.append(rendering("values", "values", VALUES["values"], {}))
            continue
        for name, messages in CONVERSATIONS.items():
            cases.append(rendering(path.stem, name, messages, {}))
            if "tool" in name:
                cases.append(rendering(path.stem, name, messages, {"tools": [TOOL]}))
            if "turn" in name or "question" in name:
                cases.append(rendering(path.stem, name, messages, {"add_generation_prompt": True}))
        more = {"add_generation_prompt": True, "enable_thinking": False, "today": "today", "bos_token": "<other>"}
        cases.append(rendering(path.stem, "one turn", CONVERSATIONS["one turn"], more))
    return cases


TEXT = (
    "You answer questions. Who are you? A test. What is 2 + 2? It is 4. And 3 + 3? Hello! How are you? "
    "Hi, be brief. The cat sat on the mat, and the dog sat beside it. user assistant system "
).split(". ")
TURNS = ["<|open|>", "<|close|>"]


def byte_level():
    """Byte-level BPE, as Llama 3 and Qwen have it: no bytes are unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", *TURNS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def template(tokenizer, single):
    ids = [(token, tokenizer.token_to_id(token)) for token in ["<s>", "</s>"]]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ids)


def words():
    """Whole words, lower case."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>", *TURNS]))
    return tokenizer


def pieces():
    """Unigram over pieces with a mark for spaces, as SentencePiece has it."""
    text = " ".join(TEXT)
    scores = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "▁": -2.0}
    scores |= {letter: -5.0 for letter in sorted(set(text) - {" "})}
    scores |= {f"▁{word}": -3.0 - len(word) / 8 for word in sorted(set(text.split()))}
    tokenizer = Tokenizer(models.Unigram(list(scores.items()), unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ["<unk>", "<s>", "</s>"]])
    return tokenizer


def tokenizers():
    """Each with the fields of its `tokenizer_config.json`."""
    plain, bos, both, left = byte_level(), byte_level(), pieces(), words()
    bos.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template(bos, "<s> $A")])
    both.post_processor = template(both, "<s> $A </s>")
    left.enable_truncation(8, direction="left")
    left.post_processor = template(left, "$A </s>")
    turns, generation = [(HERE / "templates" / f"{name}.jinja").read_text() for name in ["turns", "generation"]]
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    return {
        # Nothing is put around a text; a config that asks for it has no say where there is a tokenizer.json.
        "plain": (plain, {**roles, "add_bos_token": True, "chat_template": turns}),
        "bos": (bos, {**roles, "chat_template": [{"name": "default", "template": generation}]}),
        # Special tokens that only the config knows: of the vocabulary, and new ones.
        "both": (both, {**roles, "pad_token": "<pad>", "additional_special_tokens": [*TURNS, "▁are"]}),
        "left": (left, {**roles, "unk_token": {"__type": "AddedToken", "content": "<unk>", "lstrip": True}, "sep_token": "cat"}),
    }


SAMPLES = [
    "Who are you?",
    "The cat sat on the mat, and the dog sat beside it.",
    "a <s> b</s><|open|>user\nHi<|close|>\n<pad> <unk> Zürich 日本 🎉",
    " cat  cat ",
    "",
]


def tokens():
    cases = []
    for name, (tokenizer, config) in tokenizers().items():
        folder = HERE / "tokenizers" / name
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        library = PreTrainedTokenizerFast.from_pretrained(folder)
        library._tokenizer.no_truncation()
        case = {"tokenizer": name, "truncation_side": library.truncation_side, "size": len(library), "texts": [], "chats": []}
        for text in SAMPLES:
            whole = library(text)["input_ids"]
            case["texts"].append({"text": text, "whole": whole, "inside": library(text, add_special_tokens=False)["input_ids"]})
        for conversation in ["one turn", "several turns", "letters", "nothing said"] if library.chat_template else []:
            messages = CONVERSATIONS[conversation]
            out = library.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=name == "bos"
            )
            chat = {"messages": messages, "ids": out["input_ids"]}
            case["chats"].append({**chat, "mask": out["assistant_masks"]} if name == "bos" else chat)
        cases.append(case)
    return cases


CALLING = [user("Sun?"), {**CALL, "content": "<think>\nAsk.\n</think>\n\n"}, tool("fine"), assistant("<think>\nGood.\n</think>\n\nYes.")]
REASONED = {
    "one turn": [user("Hi"), assistant("<think>\nA greeting.\n</think>\n\nHello!")],
    "no reasoning": [user("Hi"), assistant("Hello!")],
    "two turns": CONVERSATIONS["reasoning in the text"],
    "last without": [*CONVERSATIONS["reasoning in the text"][:3], assistant("Because.")],
    "three turns": [system("Be brief."), *CONVERSATIONS["reasoning in the text"], user("Hi"), assistant("<think>\n4\n</think>\n\n4")],
    "a question at the end": [*CONVERSATIONS["reasoning in the text"], user("And?")],
    "the same texts": [user("Hi"), assistant("Hi"), user("Hi"), assistant("Hi")],
    "an answer that starts like a tag": [user("Hi"), assistant("<"), user("Hi"), assistant("<thin"), user("Hi"), assistant("<b>")],
    "nothing said": [user(""), assistant(""), user(""), assistant("")],
    "an answer first": [assistant("Hello!"), user("Hi"), assistant("Yes.")],
    "calls": CALLING,
    "calls, then a question": [*CALLING, user("Why?"), assistant("<think>\nHm.\n</think>\n\nBecause.")],
}


SAID = ["It is<s>", "", "4 \n", "<|close|>", "A test.<|close|>", " "]
ENDS = {
    "answers that end with tokens": [turn for said in SAID for turn in (user("Hi"), assistant(said))],
    "the last ends with a token": [user("Hi"), assistant("Hello!"), user("Who are you?"), assistant("A test.<s>")],
    "the last is empty": [user("Hi"), assistant("<s>"), user("Who are you?"), assistant("")],
    "answers that end themselves": [user("Hi"), assistant("Hello!</s>"), user("Who are you?"), assistant("A</s> test.</s>")],
}
# Behind a token that stops generation, the next message cannot be what ends an answer.
UNENDED = {name: ["answers that end themselves"] for name in ["next", "final"]}


def marked():
    """The templates of `marked`, with what transformers says of their blocks."""
    library = PreTrainedTokenizerFast.from_pretrained(HERE / "tokenizers" / "plain")
    cases = []
    for path in sorted((HERE / "marked").glob("*.jinja")):
        for name, messages in {**REASONED, **ENDS}.items():
            if "calls" in name and path.stem != "steps" or name in UNENDED.get(path.stem, []):
                continue
            out = library.apply_chat_template(
                messages, chat_template=path.read_text(), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            cases.append({"template": path.stem, "messages": messages, "ids": out["input_ids"], "mask": out["assistant_masks"]})
    return cases


def example():
    """The tokenizer of `examples/chat`, trained on its conversations."""
    folder = HERE.parents[3] / "examples" / "chat"
    lines = (folder / "conversations.jsonl").read_text().splitlines()
    texts = [message["content"] for line in lines for message in json.loads(line)["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def write(name, cases):
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / name).write_text(f"[\n{lines}\n]\n")


assert transformers.__version__.startswith("5.17"), transformers.__version__
write("renderings.json", renderings())
write("tokens.json", tokens())
write("marked.json", marked())
example()
