//! Generates `docs/models.md` from the table of families and the keys that their parsers read.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::hf::{FAMILIES, Family, HfConfig};
use crate::model::Architecture;

const INTRODUCTION: &str = "\
# Models

<!-- Written from the table of families by `UPDATE_DOCS=1 cargo test -p fsdp-nn --lib docs_models`. -->

`model.path` names a directory with a Hugging Face `config.json` of one of these families. Spellings of transformers 4 and
5 are understood, and absent keys have the values that transformers 5.17 gives them, except for sizes, which must be there.
Every family is held to transformers 5.17.0 on PyTorch 2.11.0, by files that these wrote from small models
([tests/golden](../tests/golden/README.md)): loss, logits, gradients and steps of optimizers. Sharded training of each is
compared with unsharded training, bit by bit, and its gradients with differences of the loss.

Of each family's keys below, those under *read* are understood with every value that transformers takes. Those with
*only* some values are refused with others, and no command runs. All other keys change nothing, because
transformers' own training of the family does not look at them (`use_cache`, token ids, keys of generation and of older
versions); an export carries them on. `pad_token_id` is one of them: transformers gives the embedding of that token no
gradient, here it is a token like others, whose targets `data` leaves out.

## Rotary positions

Of `rope_scaling`, or `rope_parameters` where that is absent, with `rope_type` (before: `type`):

| `rope_type` | keys |
|---|---|
| `default` | `rope_theta` |
| `linear` | `factor` |
| `dynamic` | `factor`; acts on sequences (`data.seq_len`) longer than `max_position_embeddings` |
| `llama3` | `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings` |
| `yarn` | `factor`, `original_max_position_embeddings`, `beta_fast`, `beta_slow`, `attention_factor`, `mscale`, `mscale_all_dim`, `truncate` |
| `longrope` | `short_factor`, `long_factor`, `original_max_position_embeddings`, `factor`, `attention_factor`; long factors act on sequences longer than the original positions |

`rope_theta`, `partial_rotary_factor` and `original_max_position_embeddings` may also stand outside. Other keys of these
objects are refused. Frequencies are computed in single precision, as in transformers, and held to its own functions.

## Mixtures of experts

In `mixtral` and `qwen3_moe` a router sends each token to some of the experts of a layer. Weights of experts have the names of published
files, one tensor each, and are sharded by rows like all others; a layer is gathered whole, with all of its experts. No token is dropped, so buffers have
the same sizes whatever the router says, and predicted memory is exact. Products run over the tokens of each expert, so time, and
`mfu`, follow the experts that tokens are sent to. Equal probabilities go to the expert with the lower number. Adapters take the maps of attention, as in PEFT: neither routers
nor experts. On `torch-cpu` and `cuda` the order of rows is worked out on the host, which waits for the device in every layer.

The balancing loss of routers is added in training if `config.json` has `output_router_logits`, with `router_aux_loss_coef`, as in
transformers; `train.router_aux_loss_coef` of the run file goes before both. It is `load_balancing_loss_func` of transformers, held
to it by golden files: over the tokens of a micro-batch and of all layers together. Of a step it is the mean over
micro-batches, weighted by their counted targets (transformers' trainer adds it up where it accumulates gradients), so
`micro_batch_size` says among how many tokens experts are balanced, and the number of ranks changes nothing. Tokens behind the last
counted target of their sample, padding among them, are left out; transformers leaves out what `attention_mask` does, which keeps
tokens that are not padding. Evaluations are of the cross-entropy alone.
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
    let asked = HfConfig::asked(&text).unwrap();
    let outer = || asked.iter().filter(|(key, _)| !key.contains('.'));
    let read = outer().filter(|(_, only)| only.is_none()).map(|(key, _)| format!("`{key}`"));
    let refused = outer().filter_map(|(key, only)| Some(format!("`{key}`: {}", only.as_ref()?)));
    let model = HfConfig::parse(&text).unwrap().build().unwrap();
    let Family { model_type, class, about, .. } = family;
    write!(
        page,
        "\n## `{model_type}`\n\n{about}\nClass `{class}`.\n\n- Read: {}.\n- Only with these values: {}.\n- Tensors: {}",
        list(read),
        refused.collect::<Vec<_>>().join("; "),
        list(tensors(&*model)),
    )
    .unwrap();
    if let Some(prefix) = family.optional_prefix {
        write!(page, "; published files leave `{prefix}` out").unwrap();
    }
    let constants = list(family.constants.iter().map(|end| format!("`*{end}`")));
    writeln!(page, ". Ignored in files: {constants}.").unwrap();
}

#[test]
fn docs_models_says_what_the_table_of_families_says() {
    let mut page = INTRODUCTION.to_owned();
    for family in FAMILIES {
        section(family, &mut page);
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
