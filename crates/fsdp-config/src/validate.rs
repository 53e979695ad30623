//! Rules between keys that do not need the model.

use fsdp_ckpt::is_url;
use fsdp_core::DType;
use fsdp_core::schedule::{Offload, Reshard};

use super::adapter::{Quantize, TARGETS, Targets};
use super::error::ConfigError;
use super::fsdp::MeshConfig;
use super::kind::MICRO_BATCH_TOKENS_MAX;
use super::named::{Named, one_of};
use super::optimizer::{OptimizerConfig, RULES};
use super::reader::Origin;
use super::resolved::Resolved;
use super::run::{Device, ExportWeights, QUANTIZE};
use super::schedule::{LrShape, MinLr};
use super::warning::Warning;

/// Checks all rules that involve more than one key.
///
/// # Errors
/// The first rule that is broken.
pub(super) fn validate(
    config: &Resolved,
    origin: &Origin,
    warnings: &mut Vec<Warning>,
) -> Result<(), ConfigError> {
    mesh(config, origin)?;
    batches(config, origin)?;
    cache(config, origin)?;
    export(config, origin)?;
    evaluations(config, origin)?;
    metrics(config, origin)?;
    columns(config, origin)?;
    adapter(config, origin)?;
    loss_scale(config, origin)?;
    device(config, origin)?;
    reshard(config, origin, warnings)?;
    schedule(config, origin, warnings)
}

fn batches(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let (global, micro) = (config.train.global_batch_size, config.train.micro_batch_size);
    let seq_len = config.data.seq_len;
    if micro * seq_len > MICRO_BATCH_TOKENS_MAX {
        let max = MICRO_BATCH_TOKENS_MAX / seq_len;
        let allowed = format!(
            "at most {max} with data.seq_len = {seq_len}: a micro-batch has at most {MICRO_BATCH_TOKENS_MAX} tokens"
        );
        return Err(out_of_range(origin, "train.micro_batch_size", &micro.to_string(), allowed));
    }
    divides(origin, ("train.micro_batch_size", micro), ("train.global_batch_size", global))?;
    let per_step = "the micro-batches per step, global_batch_size / micro_batch_size";
    let key = if config.fsdp.mesh.context == 1 { "run.ranks" } else { "run.ranks / fsdp.mesh.context" };
    let dp_degree = config.fsdp.mesh.dp_degree(config.run.ranks);
    divides(origin, (key, dp_degree), (per_step, config.train.micro_batches_per_step()))
}

/// Cached tokens are memory-mapped, which requires local files.
fn cache(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    match config.data.cache.as_ref().filter(|cache| is_url(cache)) {
        Some(cache) => Err(out_of_range(origin, "data.cache", cache, "a folder, not a URL".to_owned())),
        None => Ok(()),
    }
}

/// Averaged weights can be exported only if the run keeps an average, and only by the ranks that hold it: an object
/// store gets the parameters of a checkpoint.
fn export(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let allowed = match config.run.export_weights {
        ExportWeights::Ema if config.train.ema_decay.is_none() && !is_schedule_free(config) => {
            "\"last\", unless train.ema_decay is set"
        }
        ExportWeights::Ema if is_url(&config.run.out_dir) => "\"last\" where run.out_dir is an object store",
        _ => return Ok(()),
    };
    Err(out_of_range(origin, "run.export_weights", "\"ema\"", allowed.to_owned()))
}

fn is_schedule_free(config: &Resolved) -> bool {
    matches!(config.train.optimizer, OptimizerConfig::ScheduleFree(_))
}

/// Early stopping and `keep_best` need evaluations.
fn evaluations(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let names: Vec<&str> = config.data.eval.iter().map(|set| &*set.name).collect();
    let best = config.checkpoint.keep_best;
    if names.is_empty() && best > 0 {
        let allowed = "0 unless data.eval is set".to_owned();
        return Err(out_of_range(origin, "checkpoint.keep_best", &best.to_string(), allowed));
    }
    let Some(early_stop) = &config.train.early_stop else { return Ok(()) };
    if names.is_empty() {
        let allowed = "left out unless data.eval is set".to_owned();
        return Err(out_of_range(origin, "train.early_stop", "a table", allowed));
    }
    match &early_stop.set {
        Some(set) if !names.contains(&set.as_str()) => {
            let allowed = format!("the name of an evaluation set: {}", names.join(", "));
            Err(out_of_range(origin, "train.early_stop.set", &format!("\"{set}\""), allowed))
        }
        _ => Ok(()),
    }
}

/// Objects cannot be appended to, and these files would not be readable before the run ends.
fn metrics(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    if config.run.metrics.is_empty() || !is_url(&config.run.out_dir) {
        return Ok(());
    }
    let allowed = "[] where run.out_dir is a URL: an object store gets metrics.jsonl only".to_owned();
    let names: Vec<&str> = config.run.metrics.iter().map(|sink| sink.name()).collect();
    Err(out_of_range(origin, "run.metrics", &format!("{names:?}"), allowed))
}

/// A document is either one field, or a prompt and a completion.
fn columns(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let data = &config.data;
    let pair = [("data.prompt", &data.prompt), ("data.completion", &data.completion)];
    let given = pair.iter().find(|(_, column)| column.is_some());
    let (Some(_), Some((second, _))) = (&data.column, given) else { return Ok(()) };
    Err(ConfigError::Conflict {
        origin: origin.of(second),
        first: "data.column".to_owned(),
        second: (*second).to_owned(),
        remedy: "a document is one column, or a prompt with its completion",
    })
}

fn mesh(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let (mesh, ranks) = (&config.fsdp.mesh, config.run.ranks);
    let MeshConfig { replicate, context, expert, .. } = *mesh;
    let chunks = (config.fsdp.chunks_key(), config.fsdp.chunks());
    let expert_chunks = (config.fsdp.expert_chunks_key(), config.fsdp.expert_chunks());
    for (key, number) in [("fsdp.mesh.context", context), chunks, ("fsdp.mesh.expert", expert), expert_chunks]
    {
        if !number.is_power_of_two() {
            let allowed = "a power of two: sums over chunks are trees".to_owned();
            return Err(out_of_range(origin, key, &number.to_string(), allowed));
        }
    }
    divides(origin, ("fsdp.mesh.context", context), chunks)?;
    divides(origin, ("fsdp.mesh.expert", expert), expert_chunks)?;
    divides(origin, ("fsdp.mesh.context", context), ("run.ranks", ranks))?;
    divides(origin, chunks, ("data.seq_len", config.data.seq_len))?;
    let (of, rest) = match context {
        1 => ("run.ranks", ranks),
        _ => ("run.ranks / fsdp.mesh.context", ranks / context),
    };
    divides(origin, ("fsdp.mesh.replicate", replicate), (of, rest))?;
    if expert > 1 {
        let shards = ("run.ranks / fsdp.mesh.replicate", ranks / replicate);
        divides(origin, ("fsdp.mesh.expert", expert), shards)?;
    }
    match mesh.shard {
        Some(shard) if shard != rest / replicate => {
            let context =
                if context == 1 { String::new() } else { format!(" / fsdp.mesh.context = {context}") };
            let allowed = format!(
                "{} (run.ranks = {ranks}{context} / fsdp.mesh.replicate = {replicate})",
                rest / replicate
            );
            Err(out_of_range(origin, "fsdp.mesh.shard", &shard.to_string(), allowed))
        }
        _ => Ok(()),
    }
}

/// With an adapter all other parameters are frozen already, and the export is assembled in a local folder. Those of experts are
/// plain, as in PEFT.
fn adapter(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let Some(adapter) = &config.adapter else { return Ok(()) };
    let conflict = |first: &str, second: &str, remedy: &'static str| {
        let [first, second] = [first, second].map(str::to_owned);
        Err(ConfigError::Conflict { origin: origin.of(&second), first, second, remedy })
    };
    if !config.fsdp.frozen.is_empty() {
        let remedy =
            "with an adapter the model is frozen except for adapter.modules_to_save; remove one of the two";
        return conflict("adapter", "fsdp.frozen", remedy);
    }
    let of_experts = "adapter.target_parameters";
    for (key, is_set) in [("adapter.dropout", adapter.dropout > 0.0), ("adapter.dora", adapter.dora)] {
        if is_set && !adapter.target_parameters.is_empty() {
            let remedy =
                "adapters of experts have neither dropout nor magnitudes, as in PEFT; remove one of the two";
            return conflict(of_experts, key, remedy);
        }
    }
    let is_empty = matches!(&adapter.target_modules, Targets::Named(names) if names.is_empty());
    if is_empty && adapter.target_parameters.is_empty() {
        let allowed = format!("{}; it is empty only beside {of_experts}", TARGETS.allowed);
        return Err(out_of_range(origin, "adapter.target_modules", "[]", allowed));
    }
    match Some(&config.run.out_dir).filter(|out_dir| is_url(out_dir)) {
        Some(url) => {
            let allowed = "a folder, not a URL: adapters are not exported to object stores".to_owned();
            Err(out_of_range(origin, "run.out_dir", url, allowed))
        }
        None => Ok(()),
    }
}

/// Only f16 has too little range for gradients.
fn loss_scale(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    if config.train.loss_scale.is_none() || config.fsdp.param_dtype == DType::F16 {
        return Ok(());
    }
    let allowed = "left out unless fsdp.param_dtype is \"f16\"".to_owned();
    Err(out_of_range(origin, "train.loss_scale", "a table", allowed))
}

/// Rejects an update rule or a quantized base that the device lacks, and state in host memory where nothing can work on it there.
fn device(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let (device, rule) = (config.run.device, config.train.optimizer.name());
    let lacked = device.lacks();
    if lacked.contains(&rule) {
        let others = one_of(RULES.iter().map(|&(name, ..)| name).filter(|name| !lacked.contains(name)));
        let allowed = format!("{others} with run.device = \"{}\"", device.name());
        return Err(out_of_range(origin, "train.optimizer.name", &format!("\"{rule}\""), allowed));
    }
    let quantize = config.adapter.as_ref().map_or(Quantize::None, |adapter| adapter.quantize);
    if lacked.contains(&QUANTIZE) && quantize != Quantize::None {
        let allowed = format!("\"none\" with run.device = \"{}\"", device.name());
        return Err(out_of_range(origin, QUANTIZE, &format!("\"{}\"", quantize.name()), allowed));
    }
    let reason = match (device, rule) {
        _ if config.fsdp.offload == Offload::None => return Ok(()),
        (Device::Xla, _) => "run.device = \"xla\": programs have no queues to and from the host",
        (_, "muon") => "train.optimizer.name = \"muon\"; or choose another optimizer",
        _ => return Ok(()),
    };
    Err(out_of_range(origin, "fsdp.offload", "\"cpu\"", format!("\"none\" with {reason}")))
}

fn reshard(config: &Resolved, origin: &Origin, warnings: &mut Vec<Warning>) -> Result<(), ConfigError> {
    let Reshard::ToGroup(group) = config.fsdp.reshard_after_forward else { return Ok(()) };
    if group == 1 {
        warnings.push(Warning::GroupsOfOne);
    }
    let shards = config.run.ranks / config.fsdp.mesh.replicate;
    divides(origin, ("fsdp.reshard_after_forward", group), ("the shard axis, ranks / replicate", shards))
}

fn schedule(config: &Resolved, origin: &Origin, warnings: &mut Vec<Warning>) -> Result<(), ConfigError> {
    let schedule = &config.train.lr_schedule;
    let (warmup_steps, steps) = (schedule.warmup.steps, config.train.steps);
    if warmup_steps > steps {
        let [warmup_origin, steps_origin] =
            ["train.lr_schedule.warmup_steps", "train.steps"].map(|key| origin.of(key));
        warnings.push(Warning::EndsInWarmup { warmup_steps, warmup_origin, steps, steps_origin });
    }
    if let (Some(MinLr::Absolute(min_lr)), Some(lr)) = (schedule.shape.min(), config.train.optimizer.lr())
        && min_lr > lr
    {
        let allowed = format!("at most train.optimizer.lr = {lr}");
        return Err(out_of_range(origin, "train.lr_schedule.min_lr", &min_lr.to_string(), allowed));
    }
    schedule_free(config, origin)?;
    adafactor_schedule(config, origin)
}

/// A schedule-free rule has its own warm-up and average, and exports what the ranks hold.
fn schedule_free(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    if !is_schedule_free(config) {
        return Ok(());
    }
    let (train, rule) = (&config.train, "with train.optimizer.name = \"schedule_free_adamw\"");
    let schedule = &train.lr_schedule;
    let (key, value, allowed) = if schedule.shape != LrShape::Constant || schedule.warmup.steps > 0 {
        (
            "train.lr_schedule",
            "a schedule".to_owned(),
            "left out, or \"constant\" without warm-up (the rule has its own warmup_steps),",
        )
    } else if let Some(decay) = train.ema_decay {
        ("train.ema_decay", decay.to_string(), "\"none\"")
    } else if is_url(&config.run.out_dir) {
        ("run.out_dir", format!("\"{}\"", config.run.out_dir), "a folder, not an object store,")
    } else {
        return Ok(());
    };
    Err(out_of_range(origin, key, &value, format!("{allowed} {rule}")))
}

/// Adafactor's own learning rate cannot have a schedule.
fn adafactor_schedule(config: &Resolved, origin: &Origin) -> Result<(), ConfigError> {
    let derives_lr =
        matches!(&config.train.optimizer, OptimizerConfig::Adafactor(adafactor) if adafactor.relative_step);
    let schedule = &config.train.lr_schedule;
    let is_constant = schedule.shape == LrShape::Constant && schedule.warmup.steps == 0;
    if !derives_lr || is_constant {
        return Ok(());
    }
    Err(ConfigError::Conflict {
        origin: origin.of("train.lr_schedule"),
        first: "train.optimizer.relative_step".to_owned(),
        second: "train.lr_schedule".to_owned(),
        remedy: "remove the schedule, or set relative_step = false and an lr",
    })
}

fn divides(
    origin: &Origin,
    divisor: (&'static str, usize),
    dividend: (&'static str, usize),
) -> Result<(), ConfigError> {
    if dividend.1.is_multiple_of(divisor.1) {
        return Ok(());
    }
    Err(ConfigError::Divisibility {
        origin: origin.of(divisor.0),
        divisor_key: divisor.0,
        divisor: divisor.1 as u64,
        dividend_key: dividend.0,
        dividend: dividend.1 as u64,
    })
}

fn out_of_range(origin: &Origin, key: &str, value: &str, allowed: String) -> ConfigError {
    ConfigError::Value { origin: origin.of(key), key: key.to_owned(), value: value.to_owned(), allowed }
}
