//! Generates `docs/models.md` from the table of families and the keys that their parsers read.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::hf::{FAMILIES, Family, HfConfig, REFUSED};
use crate::model::Architecture;

const INTRODUCTION: &str = "\
# Models

<!-- Written from the table of families by `UPDATE_DOCS=1 cargo test -p fsdp-nn --lib docs_models`. -->

`model.path` names a directory with a Hugging Face `config.json` of one of these families. Spellings of transformers 4 and
5 are both understood, and absent keys have the values that transformers 5.17 gives them, except for sizes, which are required.
Every family is tested against transformers 5.17.0 on PyTorch 2.11.0, with files that these wrote from small models
([tests/golden](../tests/golden/README.md)): loss, logits, gradients and optimizer steps. For each family, sharded training is
compared bit by bit with unsharded training, and gradients with finite differences of the loss.

Of each family's keys below, those under *read* accept every value that transformers accepts. Those with
*only* some values are refused with any other value, and no command runs. All other keys have no effect, because
transformers' own training of the family ignores them (`use_cache`, token ids, keys of generation and of older
versions); an export keeps them.

Files that a model class without a head wrote (`LlamaModel.save_pretrained`, the published GPT-2) name tensors without the first
part: `layers.0...` where a model with a head has `model.layers.0...`. Both are read. Such files hold no output head, so they are whole
only if `tie_word_embeddings` is set; transformers would silently begin with a random head otherwise, which is refused here. An export
names all tensors in full, and the class with a head in `architectures`.

## The row of the padding token

In all families but `gpt2` and `gpt_neox`, transformers builds the embedding with `padding_idx` = `pad_token_id`: inputs give that
row of the table no gradient (an output head that shares the table still does), and random weights start with zeros in it. This matters
where the token also occurs in the text, as it does if the end-of-text token or `<|im_end|>` pads samples. Training here does the same.
An absent key has the default of the family's configuration class (0 in Gemma, ERNIE, HunYuan and Cohere, 1 in OLMo 2 and 3 and Seed-OSS, 32000 in Phi 3, 128004 in SmolLM 3, 151329 in GLM 4, no row in
the others), `null` means no row, and a negative token counts from the end of the vocabulary. `fsdp check` names the token.
`model.padding_row = \"none\"` in the run file trains the row like all others. Neither changes which targets count
([data](data.md)), nor what a given model computes, so evaluation and generation are unaffected.

## Rotary positions

Read from `rope_scaling`, or from `rope_parameters` if that is absent, by `rope_type` (formerly `type`):

| `rope_type` | keys |
|---|---|
| `default` | `rope_theta` |
| `linear` | `factor` |
| `dynamic` | `factor`; affects sequences (`data.seq_len`) longer than `max_position_embeddings` |
| `llama3` | `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings` |
| `yarn` | `factor`, `original_max_position_embeddings`, `beta_fast`, `beta_slow`, `attention_factor`, `mscale`, `mscale_all_dim`, `truncate` |
| `longrope` | `short_factor`, `long_factor`, `original_max_position_embeddings`, `factor`, `attention_factor`; long factors affect sequences longer than the original positions |

`rope_theta`, `partial_rotary_factor` and `original_max_position_embeddings` may also be outside of these objects. Other keys in them
are refused. Frequencies are computed in single precision, as in transformers, and tested against its own functions.

## What is trained where

| | `cpu`, `torch-cpu`, `cuda` | `xla` | [context axis](parallelism.md#context-axis) | [expert axis](parallelism.md#expert-axis) | [adapters](adapters.md) |
|---|---|---|---|---|---|
| families without mixtures | yes | yes | yes | | all linear maps |
| mixtures, and with them latent attention and sinks | yes | refused by name | yes | yes | all linear maps but routers; [experts](adapters.md#experts) |
| linear attention (`qwen3_next`, `qwen3_5_text`, `qwen3_5_moe_text`) | yes | refused by name | refused by name | with mixtures | all linear maps but routers; [experts](adapters.md#experts) |

## Linear attention

Most layers of `qwen3_next` and of Qwen 3.5 have no softmax attention but states, which the gated delta rule (Yang et al., 2024) updates token by token, behind a short convolution. The rule is computed in
chunks of 64 tokens, as in transformers, which count from the first token of each document: where samples pack several, states and convolutions begin anew with each, and a document
has the bits that it has alone. Arithmetic and states are in f32 (f64 if the model is). Backward computes the states before all
chunks again, of one layer at a time, in memory that plans count, instead of keeping them. States travel through a sample, so a context axis is refused by name, and so is `xla`, which has no rule for the operation.

`qwen3_5_text` and `qwen3_5_moe_text` are the text parts of models of text and images (`qwen3_5`, `qwen3_5_moe`), which can be named instead: their `text_config` is read, tensors `model.language_model.*` have the names of the
text model, and those of images (`model.visual.*`) are left out, as transformers does for its class for text. An export is the text model. Positions have one kind there, so that sections of rotary positions change nothing. Layers that predict the tokens after the
next (`mtp.*`) are left out, too.

## Parameters in f32

With `fsdp.param_dtype` = `bf16` or `f16`, some parameters are gathered in f32, and what they compute, from its input in 16 bits to its result, is in f32, too, as in transformers
or in the published files: the weights and corrections of routers in `deepseek_v3`, `glm4_moe`, `glm4_moe_lite`, `minimax_m2` and `ernie4_5_moe`, and the norms of hidden states in `gpt_oss`.
`fsdp.keep_f32` names others, by patterns that replace these (`[]` for none). They may be norms, linear maps (with their biases, and all that share a product: queries, keys and
values), routers with their corrections, and `A_log` with `dt_bias` of linear attention; others are refused by name. Such parameters take twice the bytes in gathers, and their
operations two conversions. The bits are those of a single rank, as always.

## Mixtures of experts

In models with mixtures (those with `moe` in their name, `mixtral`, `minimax_m2`, `deepseek_v3`, `gpt_oss`, `qwen3_next`) a router sends each token to some of the experts of a layer. Expert weights
have the names of published files, one tensor each, and are sharded by rows like all others; where files have stacks of all experts (`gpt_oss`), the stacks are read and
exported. A layer is gathered whole, with all of its experts, or on an [expert axis](parallelism.md#expert-axis) with some of them. No token is dropped, so buffers have the
same sizes whatever the router selects, and predicted memory is exact. Products run over the tokens of each expert, so time and `mfu` depend on the experts that tokens are
sent to. Ties between scores go to the expert with the lower number. [Adapters](adapters.md) apply to the projections of attention and to shared experts, to experts if the run file
[names them](adapters.md#experts), and not to routers. On `torch-cpu` and `cuda` the order of rows is computed on the host, which waits for the device in every layer, in backward once per expert and weight.

Routers of `deepseek_v3`, `glm4_moe`, `glm4_moe_lite`, `minimax_m2` and `ernie4_5_moe` compute in f32 ([above](#parameters-in-f32)); those of other families in the dtype of
the model (`fsdp.param_dtype`), like all other maps, as in transformers.

### Corrections

The routers of `deepseek_v3`, `glm4_moe`, `glm4_moe_lite`, `minimax_m2` and `ernie4_5_moe` add `e_score_correction_bias` to scores when they choose experts. It has no gradient.
transformers keeps it as it is, and so does training here, unless `train.router_bias_update_speed` = u is set: after each step, the correction of an expert that had fewer routes than
the mean of its mixture grows by u, and that of one that had more falls by u (Wang et al. 2024; DeepSeek V3 used 0.001). Loads are exact sums over all ranks and micro-batches of the step, so
that the same corrections follow on every mesh; they are saved, resumed and exported like weights. The next step waits for the loads of the last one.

### Latent attention

`deepseek_v3` and `glm4_moe_lite` project queries, and keys with values, to a few elements and from there to heads. Attention runs over heads of equal width: values that are narrower than
queries are padded with zeros, which costs their share of its products and of the memory of activations. Files of DeepSeek V3 and GLM 4.5 have one layer more, which predicts the token after the next; like
transformers, training leaves it out, and exports lack it. Files in FP8 are refused (`quantization_config`).

### Files in 4 bits

Files of `gpt_oss` with experts in MXFP4 (`quant_method` \"mxfp4\"), and files of bitsandbytes in NF4 or FP4 (`quant_method` \"bitsandbytes\" with `load_in_4bit`) of any family
are read as floats, exactly; training and exports have floats. Adapters can be trained on a base that stays in 4 bits
([adapters.md](adapters.md#a-base-in-4-bits-qlora)).

### Balancing loss

Training adds the load-balancing loss of routers if `config.json` has `output_router_logits`, with `router_aux_loss_coef`, as in
transformers; `train.router_aux_loss_coef` of the run file overrides both. The loss is `load_balancing_loss_func` of transformers, tested
against it with golden files: over the tokens of a micro-batch and of all layers together. For a step it is the mean over
micro-batches, weighted by their counted targets (transformers' trainer sums it when it accumulates gradients).
`micro_batch_size` therefore sets the number of tokens among which experts are balanced, and the number of ranks changes nothing. Tokens after
the last counted target of their sample, including padding, are excluded; transformers excludes what `attention_mask` does, which keeps
tokens that are not padding. Evaluations report the cross-entropy alone.

### z-loss of routers

`train.router_z_loss_coef` = c adds c times the mean, over the same tokens and over all mixtures, of the squared log-sum-exp of a router's logits (ST-MoE, Zoph et al. 2022,
equation 5, with c = 1e-3). It keeps logits small, which matters in 16 bits. Programs that add the z-losses of layers up instead of taking their mean have a coefficient that is
smaller by the number of mixtures. Gates of shared experts are not among the logits.

### Sequence-wise balance loss

`train.router_sequence_loss_coef` = a adds a times the sequence-wise balance loss of DeepSeek V3 (2024, equations 17 to 20), beside or instead of the balancing loss above. With E experts of
which K have a token, and T tokens in a sequence, it is the sum over experts of f P, where f is E / (K T) times the number of the sequence's routes to the expert, and P the mean of its
scores there, each divided by the sum of all experts' scores. It is the mean over the sequences of a micro-batch and over all mixtures, weighted by targets like the balancing loss;
the report of DeepSeek V3 has 1e-4, beside [corrections](#corrections). Programs that add the losses of layers up, as DeepSeek's published code, have a coefficient that is smaller by
the number of mixtures. A sequence is a document of a packed sample, or a sample that is not packed; tokens after the last counted target of their sample are excluded.
Samples must be whole: a [context axis](parallelism.md#context-axis), or `fsdp.chunks.context` above 1, is refused.
";

fn golden(family: &Family) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    match family.model_type {
        "gpt2" => folder.join("gpt2"),
        "llama" => folder.join("llama-gqa"),
        other => folder.join("families").join(other),
    }
}

/// Returns tensor names, with `N` for the layer number.
fn tensors(model: &dyn Architecture) -> BTreeSet<String> {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let pattern = |name: &String| {
        let parts = name.split('.').map(|part| if is_number(part) { "N" } else { part });
        format!("`{}`", parts.collect::<Vec<_>>().join("."))
    };
    model.description().spec.params.iter().map(|param| pattern(&param.fqn)).collect()
}

fn list(items: impl IntoIterator<Item = String>) -> String {
    items.into_iter().collect::<Vec<_>>().join(", ")
}

fn section(family: &Family, page: &mut String) {
    let text = std::fs::read_to_string(golden(family).join("config.json")).unwrap();
    let read_keys = HfConfig::read_keys(&text).unwrap();
    let outer = || read_keys.iter().filter(|(key, _)| !key.contains('.'));
    let read = outer().filter(|(_, only)| only.is_none()).map(|(key, _)| format!("`{key}`"));
    let refused = outer().filter_map(|(key, only)| Some(format!("`{key}`: {}", only.as_ref()?)));
    let model = HfConfig::parse(&text).unwrap().build().unwrap();
    let Family { model_type, class, about, base_prefix, .. } = family;
    write!(
        page,
        "\n## `{model_type}`\n\n{about}\nClass `{class}`.\n\n- Read: {}.\n- Only with these values: {}.\n- Tensors: {}; files of a \
         model without its head leave `{base_prefix}` out",
        list(read),
        refused.collect::<Vec<_>>().join("; "),
        list(tensors(&*model)),
    )
    .unwrap();
    let constants = list(family.constants.iter().map(|end| format!("`*{end}`")));
    writeln!(page, ". Ignored in files: {constants}.").unwrap();
}

#[test]
fn docs_models_page_matches_family_table() {
    let mut page = INTRODUCTION.to_owned();
    for family in FAMILIES {
        section(family, &mut page);
    }
    page.push_str("\n## What is not there\n\nFamilies whose operations are missing are refused by name:\n\n");
    for (name, why) in REFUSED {
        writeln!(page, "- `{name}`: {why}.").unwrap();
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        committed == page,
        "docs/models.md is not what the families say; run `UPDATE_DOCS=1 cargo test -p fsdp-nn --lib docs_models`"
    );
}
