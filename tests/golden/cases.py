"""The tiny models of the golden files, as Hugging Face configuration arguments.

Shared by generate.py (transformers 5) and legacy_config.py (transformers 4), so that both spellings
of `config.json` describe the same model. No import of torch or transformers here.
The sizes are small, odd where they may be, and differ from each other, so that a swapped pair of
dimensions cannot pass.
"""

VOCAB, BATCH, SEQ = 61, 4, 12
ADAMW_EPS = {"adamw3": 1e-3, "adamw8": 1e-8}

_LLAMA = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, initializer_range=0.2,
    bos_token_id=1, eos_token_id=2, use_cache=False, tie_word_embeddings=False,
)  # fmt: skip

# case -> (model_type, configuration, rotary base or None, seed)
CASES = {
    # Grouped-query attention (4 heads, 2 key/value heads), separate output head.
    "llama-gqa": ("llama", _LLAMA, 10000.0, 101),
    # The output head is the embedding. One layer here and below, to keep the folder small.
    "llama-tied": ("llama", _LLAMA | dict(tie_word_embeddings=True, num_hidden_layers=1), 10000.0, 102),
    # head_dim 10 although hidden/heads is 6; one key/value head; another rotary base and epsilon.
    "llama-head-dim": (
        "llama",
        _LLAMA | dict(head_dim=10, num_key_value_heads=1, num_hidden_layers=1, rms_norm_eps=1e-6),
        500000.0,
        103,
    ),
    # Learned positions, LayerNorm, gelu_new, Conv1D, tied head; dropout off.
    "gpt2": (
        "gpt2",
        dict(
            vocab_size=VOCAB, n_positions=16, n_embd=24, n_layer=2, n_head=4, n_inner=None,
            activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            layer_norm_epsilon=1e-5, initializer_range=0.2, bos_token_id=0, eos_token_id=0,
            use_cache=False, tie_word_embeddings=True,
        ),
        None,
        104,
    ),
}  # fmt: skip
