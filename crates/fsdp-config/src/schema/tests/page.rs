//! Generates `docs/run-file.md` from the schema of run files.

use std::fmt::Write;
use std::path::Path;

use super::*;

const INTRODUCTION: &str = "\
# Run files

<!-- Written from the schema of run files by `UPDATE_DOCS=1 cargo test -p fsdp-config --lib docs_run_file`. -->

A run file is a TOML file that describes a run. `fsdp init` writes one with comments and the keys that people change, with sizes that fit
the model and the data; `examples/quickstart.toml` has comments too. This page lists every key.

- **Checks.** An unknown key is an error that names the nearest known one. `fsdp check run.toml` checks everything that the file names:
  model, weights, data, schedule, memory.
- **Changes.** `--set train.steps=50` sets a key for one command.
- **Paths** are relative to the current directory.
- **A base.** Before any table, `extends = \"base.toml\"` (relative to the file that contains it) takes another run file as the base:
  tables are merged key by key, lists are replaced, and errors name the file that set the key.
- **Editors** complete and check keys with [run.schema.json](run.schema.json), which `fsdp schema` prints: put
  `#:schema ./run.schema.json` on the first line of a run file in the same folder.

In the tables below, the first value of a key is its default. \"Required\" keys have none.
";

const ENDING: &str = "
## DDP, ZeRO and HSDP

| elsewhere | PyTorch's strategy | keys of `[fsdp]` |
|---|---|---|
| ZeRO-3, FSDP | `FULL_SHARD` | the defaults, with `wrap`; `reshard_after_forward = true` frees the root too, as ZeRO-3 does |
| ZeRO-2 | `SHARD_GRAD_OP` | `reshard_after_forward = false` |
| ZeRO-1 | none | as for ZeRO-2, with `accumulation = \"unsharded\"`: gradients stay whole until the end of a step. Its memory; its traffic too with one micro-batch per rank and step (with more, [parameters are gathered for each](memory.md#what-strategies-cost)) |
| DDP | `NO_SHARD` | `mesh = { replicate = R }` with all R ranks |
| HSDP | `HYBRID_SHARD` | `mesh = { replicate = N }` with N nodes |
| HSDP with ZeRO-2 in a node | `HYBRID_SHARD_ZERO2` | both `mesh = { replicate = N }` and `reshard_after_forward = false` |

In an `fsdp_config.json`, the strategy is `sharding_strategy` or `reshard_after_forward`. The number of nodes comes from the
launcher; without one it is 1, with a warning, and `fsdp.mesh` in the run file overrides it. `auto_wrap_policy`, `cpu_offload` and
`backward_prefetch` mean the same as there; each key that changes nothing here is named with the reason. The configuration of
`accelerate launch`, as JSON, can be named as well: with FSDP2, `dp_replicate_size` of its `parallelism_config` is `mesh.replicate`.
";

/// What the tables are for.
const SECTIONS: [(&str, &str); 7] = [
    ("model", "The model, and where its weights come from."),
    (
        "adapter",
        "LoRA on a frozen model, in PEFT's format; without this table, the model itself is trained. [Adapters](adapters.md) says more.",
    ),
    ("data", "What is trained and evaluated on. [Data](data.md) says how it is read."),
    ("train", "Batches, steps and optimizer. [Training options](training.md) has formulas and sources."),
    ("fsdp", "Sharding. [Memory](memory.md) says what settings save."),
    (
        "checkpoint",
        "When the state is saved, and what is kept. [Saving and continuing](saving.md) says more.",
    ),
    ("run", "Device, ranks and output."),
];

/// What the schema does not say of keys: their values, where its own words do not suffice, and where to read more.
const NOTES: &[(&str, Note)] = &[
    ("model.path", more("[Models](models.md) lists the families.")),
    (
        "model.init",
        more(
            "`\"pretrained\"` reads `model.safetensors` or shards and their index; where there is neither, `pytorch_model.bin` \
             or its index.",
        ),
    ),
    (
        "model.padding_row",
        more(
            "`\"config\"`: that of `pad_token_id`, [as in transformers](models.md#the-row-of-the-padding-token); `\"none\"`: all \
             rows are trained.",
        ),
    ),
    (
        "data.train",
        both(
            "required, unless there are sources",
            "Patterns such as `\"books/*.parquet\"` work; [paths](data.md#paths).",
        ),
    ),
    (
        "data.eval",
        both("`[]`; files and folders, or tables `[[data.eval]]`", "[Evaluation](watching.md#evaluation)."),
    ),
    (
        "data.format",
        more(
            "`\"auto\"`: from file names; `\"tokens-..\"`: raw little-endian ids. Text and JSON lines may be compressed as `.gz` \
             or `.zst`. [Formats](data.md#formats).",
        ),
    ),
    ("data.malformed", more("[What is wrong with data](data.md#what-is-wrong-with-data).")),
    ("data.expansion_max", more("For compressed and dictionary-encoded files; [limits](data.md#limits).")),
    (
        "data.cache",
        more("4 bytes per token; [reading, tokenizing, keeping](data.md#reading-tokenizing-keeping)."),
    ),
    ("data.chat_template", more("[Conversations](data.md#conversations).")),
    (
        "data.loss_on",
        more(
            "`\"answers\"`: in `messages` the assistant's replies, in a prompt with its completion the completion; \
             `\"last-answer\"`: of the replies those to the last question.",
        ),
    ),
    (
        "data.packing",
        more(
            "`\"stream\"`: joined, and cut every `seq_len`; `\"documents\"`: one per sample, clipped or padded; `\"packed\"`: as \
             many per sample as fit, isolated from each other. [From documents to samples](data.md#from-documents-to-samples).",
        ),
    ),
    (
        "data.bos",
        more(
            "`\"auto\"`: the token that the tokenizer adds there, if any. [For ids, completions and \
             conversations](data.md#from-documents-to-samples).",
        ),
    ),
    ("data.source", both("`[]`", "[Several sources](data.md#several-sources).")),
    (
        "train.micro_batch_size",
        more("The number of micro-batches in a step must be a multiple of the number of ranks."),
    ),
    ("train.optimizer", both("`{ name = \"adamw\" }`; a table", "[Optimizers](training.md#optimizers).")),
    ("train.ema_decay", more("[An average of the parameters](training.md#an-average-of-the-parameters).")),
    ("train.label_smoothing", more("[Loss](training.md#loss).")),
    ("train.z_loss", more("[Loss](training.md#loss).")),
    ("train.router_aux_loss_coef", more("[Mixtures of experts](models.md#mixtures-of-experts).")),
    ("train.router_z_loss_coef", more("[Mixtures of experts](models.md#z-loss-of-routers).")),
    ("train.router_sequence_loss_coef", more("[Mixtures of experts](models.md#sequence-wise-balance-loss).")),
    (
        "train.lr_schedule",
        both("`{ name = \"constant\" }`; a table", "[Learning rate](training.md#learning-rate)."),
    ),
    (
        "train.loss_scale",
        both("a table", "[f16 and the scale of the loss](training.md#f16-and-the-scale-of-the-loss)."),
    ),
    ("train.early_stop", both("none; a table", "[Early stopping](training.md#early-stopping).")),
    (
        "fsdp.wrap",
        both("required, or `min_num_params`", "Classes of modules, such as `[\"LlamaDecoderLayer\"]`."),
    ),
    (
        "fsdp.min_num_params",
        both("a number", "Modules become units by their number of parameters, instead of `wrap`."),
    ),
    (
        "fsdp.config",
        both(
            "a path",
            "A Hugging Face `fsdp_config.json`; warnings say [what became of its strategy](#ddp-zero-and-hsdp), and which keys \
             mean nothing here.",
        ),
    ),
    (
        "fsdp.reshard_after_forward",
        both(
            "`\"auto\"`, `true`, `false`, or a number n",
            "`\"auto\"`: all but the root are freed; n: units stay sharded over groups of n ranks.",
        ),
    ),
    (
        "fsdp.accumulation",
        more("`\"reduce\"`: every micro-batch is reduced; `\"unsharded\"`: once per step."),
    ),
    (
        "fsdp.accumulation_order",
        more(
            "`\"tree\"`: bits do not depend on the world size; `\"running\"`: less memory. [Numerics](numerics.md).",
        ),
    ),
    ("fsdp.param_dtype", more("[f16 needs a scale](training.md#f16-and-the-scale-of-the-loss).")),
    ("fsdp.reduce_dtype", more("Parameters in f64 are reduced in f64; f16 is not implemented.")),
    (
        "fsdp.reduce_op",
        more("`\"average\"`: over ranks, like FSDP2; [what it costs](numerics.md#averages-over-ranks)."),
    ),
    (
        "fsdp.activation_checkpointing",
        more(
            "`\"full\"`: layers; `\"selective\"`: all but products. [What each saves](memory.md#activation-checkpointing).",
        ),
    ),
    ("fsdp.offload", more("`\"cpu\"`: in host memory; [what it saves](memory.md#cpu-offload).")),
    ("fsdp.mesh", both("a table", "")),
    ("checkpoint.every", more("[Saving and continuing](saving.md).")),
    ("checkpoint.keep_best", more("[The best states](training.md#the-best-states).")),
    (
        "run.device",
        more(
            "`\"torch-cpu\"`: [libtorch's kernels](libtorch.md); `\"cuda\"`: [GPUs](gpu.md); `\"xla\"`: [any device with a PJRT \
             plugin](xla.md).",
        ),
    ),
    (
        "run.ranks",
        both("`1`, or one per process; or one per GPU of a process that has its node to itself", ""),
    ),
    ("run.xla", both("a table", "[XLA devices](xla.md).")),
    (
        "run.kernels",
        more("`\"fused\"`: our own; `\"aten\"`: composed of libtorch's operations, for comparison."),
    ),
    (
        "run.transport",
        more(
            "`\"auto\"`: NCCL for `\"cuda\"`; else MPI under `mpirun`, or `srun` with PMI, and TCP otherwise. \
             [Clusters](clusters.md#what-connects-ranks).",
        ),
    ),
    (
        "run.metrics",
        both(
            "`[]`; a list of `\"tensorboard\"`, `\"csv\"`, `\"mlflow\"`",
            "[Other forms](watching.md#other-forms).",
        ),
    ),
    ("run.metrics_listen", more("[Watching a run](watching.md#other-forms).")),
    ("run.export_weights", more("`\"ema\"`: their average, `train.ema_decay`.")),
    (
        "run.export_dtype",
        more(
            "So a base in bf16 is exported rounded to it; without such files, and for f16, that of the master copy.",
        ),
    ),
];

/// What [`NOTES`] says of a key.
struct Note {
    values: &'static str,
    more: &'static str,
}

const fn more(more: &'static str) -> Note {
    both("", more)
}

const fn both(values: &'static str, more: &'static str) -> Note {
    Note { values, more }
}

/// The page so far, and the notes that are in it.
struct Page {
    text: String,
    noted: Vec<&'static str>,
}

impl Page {
    /// Writes the table of some keys, and the tables that they hold.
    fn table(&mut self, path: &str, properties: &Map<String, Value>) {
        self.text += "\n| key | values | what |\n|---|---|---|\n";
        for (key, schema) in properties {
            self.row(&format!("{path}.{key}"), key, schema);
        }
        for (key, schema) in properties {
            self.inner(&format!("{path}.{key}"), schema);
        }
    }

    fn row(&mut self, path: &str, key: &str, schema: &Value) {
        let note = NOTES.iter().find(|(noted, _)| *noted == path);
        self.noted.extend(note.map(|(noted, _)| *noted));
        let (mut about, allowed) = about(schema);
        if schema.get("properties").is_some() {
            // The section of the table says the rest.
            about = about.split_inclusive(". ").next().unwrap_or_default().trim();
        }
        let (values, more) = note.map_or(("", ""), |(_, note)| (note.values, note.more));
        let values = if values.is_empty() { values_of(schema, allowed) } else { values.to_owned() };
        let what = format!("{about} {more}");
        assert!(what.len() > 5 && !values.is_empty(), "{path}: {values}: {what}");
        let line = format!("| `{key}` | {values} | {} |", what.trim());
        assert_eq!(line.matches('|').count(), 4, "{line}");
        writeln!(self.text, "{line}").unwrap();
    }

    /// Writes the section of a key whose value is a table, a list of tables, or one of several tables.
    fn inner(&mut self, path: &str, schema: &Value) {
        let lists = schema["anyOf"].as_array().into_iter().flatten().chain([schema]);
        let items = lists.filter_map(|list| list["items"].get("properties")).next();
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            write!(self.text, "\n### `[{path}]`\n").unwrap();
            self.table(path, properties);
        } else if let Some(properties) = items.and_then(Value::as_object) {
            write!(self.text, "\n### `[[{path}]]`\n").unwrap();
            self.table(path, properties);
        } else if let Some(tables) = schema["oneOf"].as_array() {
            self.choice(path, tables);
        }
    }

    /// Writes the tables that `name` selects from, a row each, and then what they have in common below.
    fn choice(&mut self, path: &str, tables: &[Value]) {
        write!(self.text, "\n### `[{path}]`\n\n| name | its keys, with their defaults |\n|---|---|\n")
            .unwrap();
        for table in tables {
            let properties = table["properties"].as_object().unwrap();
            let others = properties.iter().filter(|(key, _)| *key != "name");
            let keys = others.map(|(key, schema)| match schema.get("default") {
                Some(default) => format!("`{key}` {}", code(default)),
                None => format!("`{key}`"),
            });
            let keys = keys.collect::<Vec<_>>().join(", ");
            writeln!(self.text, "| `{}` | {keys} |", properties["name"]["const"]).unwrap();
        }
        let first = tables[0]["properties"].as_object().unwrap();
        first.iter().for_each(|(key, schema)| self.inner(&format!("{path}.{key}"), schema));
    }
}

/// Returns what a key means, and which values it must have.
fn about(schema: &Value) -> (&str, &str) {
    let description = schema["description"].as_str().unwrap_or_default();
    description.split_once(" It must be ").unwrap_or((description, ""))
}

fn values_of(schema: &Value, allowed: &str) -> String {
    let allowed = allowed.trim_end_matches('.').replace("a string that is not empty", "a string");
    let Some(default) = schema.get("default") else {
        return if allowed.is_empty() { "a table".to_owned() } else { format!("required; {allowed}") };
    };
    if let Some(names) = schema["enum"].as_array() {
        let others = names.iter().filter(|name| *name != default);
        let all: Vec<String> = [default].into_iter().chain(others).map(code).collect();
        return all.join(", ");
    }
    if let Value::Bool(is_set) = default {
        return format!("`{is_set}`, `{}`", !is_set);
    }
    // The default need not be said twice.
    let (first, last) = (format!("{default}, "), format!(", or {default}"));
    let others = allowed.strip_prefix(&first).map_or(allowed.as_str(), |rest| rest.trim_start_matches("or "));
    let others = others.strip_suffix(&last).unwrap_or(others);
    format!("{}; {others}", code(default)).trim_end_matches("; ").to_owned()
}

/// Returns a value as it is written in a run file.
fn code(value: &Value) -> String {
    let text = match value {
        Value::Array(items) => {
            format!("[{}]", items.iter().map(Value::to_string).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    };
    format!("`{text}`")
}

#[test]
fn docs_run_file_page_matches_schema() {
    let mut page = Page { text: INTRODUCTION.to_owned(), noted: Vec::new() };
    let schema = schema();
    for (name, table) in schema["properties"].as_object().unwrap() {
        if let Some(properties) = table["properties"].as_object() {
            write!(
                page.text,
                "\n## `[{name}]`\n\n{}\n",
                SECTIONS.iter().find(|(of, _)| of == name).unwrap().1
            )
            .unwrap();
            page.table(name, properties);
        }
    }
    page.text += ENDING;
    let unused: Vec<&str> =
        NOTES.iter().map(|(key, _)| *key).filter(|key| !page.noted.contains(key)).collect();
    assert!(unused.is_empty(), "there are notes on keys that do not exist: {unused:?}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/run-file.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page.text).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        committed == page.text,
        "docs/run-file.md is not what the schema says; run `UPDATE_DOCS=1 cargo test -p fsdp-config --lib docs_run_file`"
    );
}
