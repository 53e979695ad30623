//! The benchmark's workload: a Llama of the requested dimensions, random tokens, and the settings of the peer
//! benchmark.
//!
//! Configuration and model are built from the text that a user would write, so that the benchmark takes the path of
//! every other run.

use fsdp_train::Job;
use serde_json::json;

use super::tokens::Tokens;
use crate::args::BenchTrainArgs;
use crate::error::CliError;
use crate::run_setup::Model;
use crate::toml_text::strings;

/// The job of a benchmark.
///
/// # Errors
/// [`CliError`]: the dimensions do not fit together.
pub(super) fn job(args: &BenchTrainArgs) -> Result<Job<Model>, CliError> {
    expect_head_counts(args)?;
    let tokens = Tokens::of_step("--global-batch", args.global_batch, args.seq)?;
    tokens.job("bench train", args.vocab, &model_json(args), &run_toml(args, &tokens)?)
}

/// Reports head counts that do not fit as options; the model would blame a `config.json` that does not exist.
fn expect_head_counts(args: &BenchTrainArgs) -> Result<(), CliError> {
    let BenchTrainArgs { hidden, heads, kv_heads, .. } = *args;
    if heads > 0 && !heads.checked_mul(2).is_some_and(|parts| hidden.is_multiple_of(parts)) {
        let what =
            format!("{heads} heads do not split --hidden {hidden} into parts of even width; change one");
        return Err(CliError::Option { option: "--heads", what });
    }
    if kv_heads > 0 && !heads.is_multiple_of(kv_heads) {
        let what = format!("{kv_heads} does not divide --heads {heads}; change one of them");
        return Err(CliError::Option { option: "--kv-heads", what });
    }
    Ok(())
}

fn model_json(args: &BenchTrainArgs) -> String {
    let config = json!({
        "model_type": "llama",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "max_position_embeddings": args.seq,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false,
    });
    config.to_string()
}

/// The micro-batch size: as requested, or one micro-batch per rank.
pub(super) fn micro_batch(args: &BenchTrainArgs) -> Result<usize, CliError> {
    let micro_batch = match args.micro_batch {
        Some(micro_batch) => micro_batch,
        None => args.global_batch / args.ranks(),
    };
    let per_round = micro_batch.checked_mul(args.ranks()).filter(|&samples| samples > 0);
    if per_round.is_some_and(|samples| args.global_batch.is_multiple_of(samples)) {
        return Ok(micro_batch);
    }
    let (global, ranks) = (args.global_batch, args.ranks());
    let what = format!(
        "{global} sequences cannot be split over {ranks} ranks in micro-batches of {}; \
         choose a multiple of ranks times --micro-batch",
        micro_batch.max(1)
    );
    Err(CliError::Option { option: "--global-batch", what })
}

fn run_toml(args: &BenchTrainArgs, tokens: &Tokens) -> Result<String, CliError> {
    let adapter = match args.lora_rank {
        Some(rank) => {
            let quantize = args.quantize.name();
            format!("[adapter]\nrank = {rank}\nalpha = {}\nquantize = \"{quantize}\"", 2 * rank)
        }
        None => String::new(),
    };
    let reduce_dtype = args.param_dtype.master();
    Ok(format!(
        r#"
[model]
path = "made of options"
[data]
train = [{tokens}]
format = "tokens-u32"
seq_len = {seq}
{adapter}
[train]
steps = {steps}
micro_batch_size = {micro_batch}
global_batch_size = {global_batch}
grad_clip = 1.0
optimizer = {{ name = "adamw", lr = 1e-3, betas = [0.9, 0.99], weight_decay = 0.1 }}
[fsdp]
wrap = {wrap}
param_dtype = "{param_dtype}"
reduce_dtype = "{reduce_dtype}"
activation_checkpointing = "{checkpointing}"
[run]
device = "{device}"
ranks = {ranks}
threads = {threads}
out_dir = "unused"
"#,
        tokens = tokens.toml(),
        seq = args.seq,
        steps = args.steps,
        micro_batch = micro_batch(args)?,
        global_batch = args.global_batch,
        wrap = strings(&args.wrap),
        param_dtype = args.param_dtype,
        checkpointing = if args.checkpointing { "full" } else { "none" },
        device = args.device.name(),
        ranks = args.ranks(),
        threads = args.threads.unwrap_or(0),
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, BenchCommand, Command};

    fn args(line: &str) -> BenchTrainArgs {
        let words = ["fsdp", "bench", "train"].into_iter().chain(line.split_whitespace());
        match Args::parse_from(words).command {
            Command::Bench(BenchCommand::Train(args)) => args,
            other => panic!("bench train was parsed as {other:?}"),
        }
    }

    #[test]
    fn micro_batch_defaults_to_one_per_rank() {
        assert_eq!(micro_batch(&args("--ranks 4")).unwrap(), 2);
        assert_eq!(micro_batch(&args("--ranks 2 --micro-batch 2")).unwrap(), 2);
    }

    #[test]
    fn indivisible_global_batch_is_rejected() {
        for line in ["--ranks 3", "--ranks 16", "--ranks 2 --micro-batch 3"] {
            let error = micro_batch(&args(line)).unwrap_err();
            assert!(error.to_string().starts_with("--global-batch"), "{error}");
        }
    }

    #[test]
    fn job_has_requested_dimensions_and_one_step_of_data() {
        let line = "--hidden 16 --layers 2 --heads 2 --kv-heads 1 --ffn 32 --vocab 50 --seq 8 --ranks 2";
        let job = job(&args(line)).unwrap();
        assert_eq!((job.data.samples(), job.data.micro_batches()), (8, 2));
        assert_eq!(job.plan.layout.units.len(), 3);
    }

    #[test]
    fn invalid_head_count_errors_name_option() {
        for (line, option) in [("--heads 7", "--heads: 7 heads"), ("--kv-heads 3", "--kv-heads: 3 does not")]
        {
            let error = job(&args(line)).unwrap_err().to_string();
            assert!(error.starts_with(option), "{error}");
        }
    }
}
