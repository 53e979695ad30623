//! The text of a run file of `fsdp init`: a comment for each table, and the keys that people change.

use std::fmt::Write as _;

use fsdp_config::{Device, TokenRef};

use super::choices::{Choices, Training};
use crate::toml_text::{commented, string, strings};

/// The comment on `eos`.
const EOS_COMMENT: &str = "ends each text, since the tokenizer adds nothing there";

/// Formats the run file.
pub(super) fn of(choices: &Choices) -> String {
    let mut text = Text(
        "# A run file: `fsdp check` looks at it, `fsdp train` runs it. Paths are relative to the current directory.\n\
         # Keys not listed here have defaults; docs/run-file.md of fsdp has all of them.\n"
            .to_owned(),
    );
    model(&mut text, choices);
    if choices.training.has_adapters() {
        adapter(&mut text, choices);
    }
    data(&mut text, choices);
    train(&mut text, choices);
    sharding(&mut text, choices);
    text.table("checkpoint", &["When the whole state is saved; `fsdp train --resume` continues from it."]);
    text.key("every", (choices.steps / 5).max(1), "steps");
    text.key("keep_last", 2, "older ones are deleted");
    text.table("run", &["Where it runs, and where results go. Often changed: ranks, out_dir."]);
    text.key("device", string(choices.device.name()), "");
    text.key("ranks", choices.ranks, "train.global_batch_size is a multiple of it");
    text.key("out_dir", string(&choices.out_dir), "");
    text.0
}

fn model(text: &mut Text, choices: &Choices) {
    text.table("model", &["The model: a Hugging Face directory with config.json."]);
    text.key("path", string(&choices.model), "");
    match choices.training {
        Training::New => {
            text.key("init", string("random"), "\"pretrained\" starts from the weights in the directory");
        }
        _ => text.key("init", string("pretrained"), "\"random\" starts from new weights"),
    }
}

fn adapter(text: &mut Text, choices: &Choices) {
    text.table(
        "adapter",
        &[
            "LoRA: the model stays unchanged, and small matrices added to its linear maps are trained.",
            "Often changed: rank (larger ones learn more), target_modules, merge.",
        ],
    );
    text.key("rank", choices.adapter_rank, "");
    text.key("alpha", 2 * choices.adapter_rank, "what adapters add is multiplied by alpha / rank");
    text.key("dropout", 0.05, "");
    if choices.training == Training::Quantized {
        text.key("quantize", string("nf4"), "QLoRA: the model is kept in 4 bits");
    }
    text.key("target_modules", string("all-linear"), "or names, such as [\"q_proj\", \"v_proj\"]");
    text.key("merge", false, "true: also export the model with its adapters added");
}

fn data(text: &mut Text, choices: &Choices) {
    text.table(
        "data",
        &[
            "What it learns from: files, folders and patterns of text, JSON lines, Parquet or Arrow.",
            "Often changed: train, eval, seq_len.",
        ],
    );
    text.key("train", strings(&choices.train), "");
    match choices.eval.is_empty() {
        true => {
            text.line("# eval = [\"held-out.jsonl\"]", "data that is not trained on: its loss is reported")
        }
        false => text.key("eval", strings(&choices.eval), ""),
    }
    if !choices.eval.is_empty() {
        text.key("eval_every", (choices.steps / 10).max(1), "steps");
    }
    if let Some(format) = &choices.format {
        text.key("format", string(format), "");
    }
    if let Some(column) = &choices.column {
        text.key("column", string(column), "the field with the document");
    }
    let of_bytes = choices.tokenizer == "bytes";
    text.key(
        "tokenizer",
        string(&choices.tokenizer),
        if of_bytes { "or the path of a tokenizer.json" } else { "" },
    );
    if choices.has_prompts {
        text.key("packing", string("packed"), "as many conversations per sample as fit");
        text.key("loss_on", string("answers"), "\"all\": prompts count in the loss, too");
    }
    match &choices.separator {
        Some(TokenRef::Token(token)) => text.key("eos", string(token), EOS_COMMENT),
        Some(TokenRef::Id(id)) => text.key("eos", id, EOS_COMMENT),
        None => {}
    }
    let limit_comment = format!("tokens per sample; the model is made for up to {}", choices.positions);
    text.key("seq_len", choices.seq_len, &limit_comment);
}

fn train(text: &mut Text, choices: &Choices) {
    text.table(
        "train",
        &[
            "How long, in what batches, and with which update.",
            "Often changed: steps, lr, micro_batch_size (larger ones are faster and take more memory).",
        ],
    );
    let epoch = choices.epoch_steps.map(|steps| format!("all data is seen once in about {steps}"));
    text.key("steps", choices.steps, &epoch.unwrap_or_default());
    text.key("micro_batch_size", 1, "samples that a rank computes at a time");
    text.key("global_batch_size", choices.global_batch, "samples of a step, over all ranks");
    text.key("grad_clip", "1.0", "");
    let decay = if choices.training == Training::New { "0.1" } else { "0.0" };
    let lr = format!("{:e}", choices.lr);
    let optimizer = format!("{{ name = \"adamw\", lr = {lr}, betas = [0.9, 0.95], weight_decay = {decay} }}");
    text.key("optimizer", optimizer, "");
    let warmup = (choices.steps / 20).max(1);
    let schedule = format!("{{ name = \"warmup-cosine\", warmup_steps = {warmup}, min_lr_ratio = 0.1 }}");
    text.key("lr_schedule", schedule, "");
}

fn sharding(text: &mut Text, choices: &Choices) {
    text.table("fsdp", &["How it is sharded. Often changed: param_dtype, activation_checkpointing."]);
    if let Some(class) = &choices.layer_class {
        text.key("wrap", format!("[{}]", string(class)), "modules that are gathered as one");
    }
    let (dtype, recomputed) = match choices.device {
        Device::Cuda | Device::Xla => ("bf16", "selective"),
        Device::Cpu | Device::TorchCpu => ("f32", "none"),
    };
    text.key("param_dtype", string(dtype), "what is computed in");
    text.key(
        "activation_checkpointing",
        string(recomputed),
        "\"selective\" and \"full\" take less memory and more time",
    );
}

struct Text(String);

impl Text {
    /// Begins a table, preceded by comments.
    fn table(&mut self, name: &str, comments: &[&str]) {
        self.0.push('\n');
        for comment in comments {
            let _ = writeln!(self.0, "# {comment}");
        }
        let _ = writeln!(self.0, "[{name}]");
    }

    /// Writes a key and its value, and a comment unless it is empty.
    fn key(&mut self, key: &str, value: impl std::fmt::Display, comment: &str) {
        self.line(&format!("{key} = {value}"), comment);
    }

    fn line(&mut self, line: &str, comment: &str) {
        let _ = writeln!(self.0, "{}", commented(line, comment));
    }
}

#[cfg(test)]
mod tests {
    use fsdp_config::{Init, Quantize, Resolved};
    use fsdp_data::Survey;
    use fsdp_nn::hf::HfConfig;

    use super::*;

    const MODEL: &str = r#"{"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}"#;

    fn choices(training: Training, device: Device, ranks: usize, about_tokens: u64) -> Choices {
        let (model, out) = ("model".to_owned(), "runs/run".to_owned());
        let mut choices = Choices::new(model, &HfConfig::parse(MODEL).unwrap(), training, out).unwrap();
        choices.train = vec!["chats.jsonl".to_owned()];
        (choices.device, choices.ranks) = (device, ranks);
        let found = Survey {
            files: 1,
            bytes: 4 * about_tokens,
            tokens: None,
            examined: 1 << 21,
            about_tokens,
            has_prompts: true,
            has_text: false,
        };
        choices.fit(Some(found));
        choices.steps = training.steps(choices.epoch_steps.unwrap());
        choices
    }

    #[test]
    fn adapter_run_file_for_gpus_matches_snapshot() {
        let mut choices = choices(Training::Adapters, Device::Cuda, 8, 3_000_000);
        choices.eval = vec!["held-out.jsonl".to_owned()];
        insta::assert_snapshot!(of(&choices));
    }

    #[test]
    fn every_choice_generates_valid_run_file() {
        let trainings = [Training::Whole, Training::Adapters, Training::Quantized, Training::New];
        for (training, ranks) in
            trainings.into_iter().flat_map(|training| (1..=20).map(move |ranks| (training, ranks)))
        {
            for tokens in [0, 1, 30, 1000, 100_000, u64::MAX / 8] {
                for device in [Device::Cpu, Device::Cuda] {
                    let text = of(&choices(training, device, ranks, tokens));
                    let loaded = Resolved::parse(&text, "run.toml", &[]).unwrap_or_else(|error| {
                        panic!("{training}, {device:?}, {ranks} ranks, {tokens} tokens: {error}\n{text}")
                    });
                    assert_eq!(loaded.warnings, [], "{text}");
                    let config = loaded.config;
                    assert_eq!(config.model.init == Init::Random, training == Training::New);
                    let quantize = match training {
                        Training::Adapters => Some(Quantize::None),
                        Training::Quantized => Some(Quantize::Nf4),
                        _ => None,
                    };
                    assert_eq!(config.adapter.map(|adapter| adapter.quantize), quantize);
                    let samples = tokens / config.data.seq_len as u64;
                    let per_step = config.train.global_batch_size;
                    assert!(per_step == ranks || per_step as u64 <= samples, "{text}");
                }
            }
        }
    }

    #[test]
    fn hostile_names_round_trip_unchanged() {
        let hostile = "a \"b\"\\c'\n[run]\t#\u{7f}é";
        let mut choices = choices(Training::Whole, Device::Cpu, 1, 1000);
        for name in [&mut choices.model, &mut choices.out_dir, &mut choices.tokenizer] {
            *name = hostile.to_owned();
        }
        choices.train = vec![hostile.to_owned(), "plain".to_owned()];
        choices.column = Some(hostile.to_owned());
        let config = Resolved::parse(&of(&choices), "run.toml", &[]).unwrap().config;
        assert_eq!([&config.model.path, &config.run.out_dir, &config.data.tokenizer], [hostile; 3]);
        assert_eq!(config.data.train, [hostile, "plain"]);
        assert_eq!(config.data.column.as_deref(), Some(hostile));
    }
}
