//! `--shrink`: the same units and policies on a model that a laptop trains in seconds.
//!
//! It keeps the family, the wrapped module classes, the ratio of heads to key/value heads, tied weights, biases,
//! dropouts, dtypes and every policy. It cuts layers, widths, sequences, batches and the numbers of replicas and ranks.
//! In short, it keeps what affects correctness and cuts what affects time.

mod wrapping;

use fsdp_config::{EndToken, Format, FqnPatterns, Init, Quantize, Resolved, Targets, TokenRef};
use fsdp_core::model::ModelSpec;
use fsdp_core::schedule::Reshard;
use fsdp_core::wrap::WrapPolicy;
use fsdp_nn::hf::{HfConfig, Small};
use fsdp_nn::model::Architecture;
use fsdp_nn::quantized::BLOCK;

use crate::error::CliError;
use crate::run_setup::RunSetup;
use crate::units::params;

/// Maximum tokens per sequence.
const SEQ_LEN_MAX: usize = 32;
/// Maximum micro-batches per rank of the largest world.
const ROUNDS_MAX: usize = 2;
/// Maximum layers, regardless of prefetch depth.
const LAYERS_MAX: usize = 6;
/// Maximum replicas, and ranks per group of `reshard_after_forward`.
const AXIS_MAX: usize = 2;
/// Maximum rank of adapters.
const RANK_MAX: usize = 2;
/// Number of byte tokens.
const BYTES: usize = 256;

/// A shrunk run.
#[derive(Clone, Debug)]
pub(crate) struct Shrunk {
    /// The run.
    pub(crate) setup: RunSetup,
    /// Descriptions of the changes, for the user.
    pub(crate) notes: Vec<String>,
}

/// Shrinks a run that is to be verified at `worlds`.
///
/// # Errors
/// [`CliError::Train`]: the model contradicts itself, or its wrap policy does not fit it.
pub(crate) fn shrink(setup: &RunSetup, worlds: &[usize]) -> Result<Shrunk, CliError> {
    let mut config = setup.config.clone();
    let mut notes = mesh(&mut config);
    batches(&mut config, worlds);
    let model = model(&setup.model, &config);
    let (before, after) = (setup.model.build()?, model.build()?);
    let (before, after) = (&before.description().spec, &after.description().spec);
    notes.push(format!("{} parameters to {}", params(before.elements()), params(after.elements())));
    notes.push(format!("{} to {}", setup.model.summary(), model.summary()));
    notes.push(format!(
        "sequences of {} tokens to {}, {} micro-batches of {} to {} of 1",
        setup.config.data.seq_len,
        config.data.seq_len,
        setup.config.train.micro_batches_per_step(),
        setup.config.train.micro_batch_size,
        config.train.micro_batches_per_step(),
    ));
    if config.model.init == Init::Pretrained {
        config.model.init = Init::Random;
        notes.push("random weights in place of pretrained ones".to_owned());
    }
    notes.extend(adapter(&mut config, after));
    if let WrapPolicy::MinParams(min) = config.fsdp.wrap {
        let scaled = wrapping::scale(min, before, after)?;
        notes.push(scaled.note);
        config.fsdp.wrap = WrapPolicy::MinParams(scaled.min_num_params);
    }
    notes.extend(drop_patterns("fsdp.frozen", &mut config.fsdp.frozen, before, after));
    if let Some(patterns) = &mut config.fsdp.keep_f32 {
        notes.extend(drop_patterns("fsdp.keep_f32", patterns, before, after));
    }
    for (key, patterns) in config.train.optimizer.patterns_mut() {
        notes.extend(drop_patterns(&key, patterns, before, after));
    }
    Ok(Shrunk { setup: RunSetup { config, model }, notes })
}

/// Shrinks the axes of the mesh, so that small worlds have replicas, shards and groups.
fn mesh(config: &mut Resolved) -> Vec<String> {
    let (replicas, shards) = (config.fsdp.mesh.replicate, config.run.ranks / config.fsdp.mesh.replicate);
    let (chunks, expert_chunks) = (config.fsdp.chunks(), config.fsdp.expert_chunks());
    config.fsdp.mesh.replicate = replicas.min(AXIS_MAX);
    config.fsdp.mesh.context = config.fsdp.mesh.context.min(AXIS_MAX);
    config.fsdp.mesh.expert = config.fsdp.mesh.expert.min(AXIS_MAX);
    config.fsdp.chunks.context = Some(chunks.min(AXIS_MAX));
    config.fsdp.chunks.expert = Some(expert_chunks.min(AXIS_MAX));
    let mut groups = None;
    if let Reshard::ToGroup(ranks) = config.fsdp.reshard_after_forward {
        // A group of all shards is the same as no group.
        let cut = if ranks < shards { Reshard::ToGroup(ranks.min(AXIS_MAX)) } else { Reshard::Always };
        groups = match cut {
            Reshard::ToGroup(cut) if cut < ranks => Some(format!("resharding to groups of {ranks} to {cut}")),
            Reshard::ToGroup(_) => None,
            _ => Some(format!("resharding to groups of {ranks}, all shards, to true")),
        };
        config.fsdp.reshard_after_forward = cut;
    }
    let mut notes = Vec::new();
    let cut = config.fsdp.mesh.replicate;
    if cut < replicas {
        notes.push(format!("{replicas} replicas to {cut}"));
    }
    let cut =
        [("samples", chunks, config.fsdp.chunks()), ("experts", expert_chunks, config.fsdp.expert_chunks())];
    let cut = cut.into_iter().filter(|(_, before, after)| after < before);
    notes.extend(cut.map(|(what, before, after)| format!("{before} chunks of {what} to {after}")));
    notes.extend(groups);
    notes
}

/// Shrinks sequences and batches. V, the number of micro-batches per step, stays a multiple of the worlds that divide
/// it and of the ranks that the mesh needs. It stays a power of two, or not one, since that determines which guarantee
/// applies.
fn batches(config: &mut Resolved, worlds: &[usize]) {
    let micro_batches = config.train.micro_batches_per_step();
    let rounds = (config.train.micro_batches_per_step() / config.run.ranks).clamp(1, ROUNDS_MAX);
    let group = match config.fsdp.reshard_after_forward {
        Reshard::ToGroup(ranks) => ranks,
        _ => 1,
    };
    // The smallest world that the policies fit; the caller chooses which worlds are verified.
    let ranks = config.fsdp.mesh.replicate
        * least_common_multiple(group, config.fsdp.mesh.context.max(config.fsdp.mesh.expert));
    let fitting = worlds.iter().filter(|&&world| micro_batches.is_multiple_of(world));
    let cut = fitting.fold(ranks, |multiple, &world| least_common_multiple(multiple, world)) * rounds;
    let loses_its_odd_factor = cut.is_power_of_two() && !micro_batches.is_power_of_two();
    config.run.ranks = ranks;
    config.train.micro_batch_size = 1;
    config.train.global_batch_size = if loses_its_odd_factor { cut * 3 } else { cut };
    config.data.seq_len = config.data.seq_len.min(SEQ_LEN_MAX);
}

fn model(model: &HfConfig, config: &Resolved) -> HfConfig {
    let prefetch = config.fsdp.forward_prefetch.max(config.fsdp.backward_prefetch);
    // One unit more than are in memory at once.
    let layers = prefetch.saturating_add(2).min(LAYERS_MAX);
    let quantizes = config.adapter.as_ref().is_some_and(|adapter| adapter.quantize != Quantize::None);
    // Blocks in all formats divide those of NF4.
    let width_step = if quantizes { BLOCK } else { 1 };
    model.shrink(Small { layers, vocab: vocabulary(config), seq_len: config.data.seq_len, width_step })
}

/// The largest vocabulary the data may need, if known without reading it.
fn vocabulary(config: &Resolved) -> Option<usize> {
    let data = &config.data;
    let has_bytes =
        data.tokenizer == "bytes" && !matches!(data.format, Format::TokensU16 | Format::TokensU32);
    let end = |token: &'_ Option<EndToken>| token.as_ref().and_then(EndToken::given).cloned();
    let special = [end(&data.bos), end(&data.eos), Some(data.pad.clone())];
    let ids = special.into_iter().flatten().map(|token| match token {
        TokenRef::Id(id) => id as usize + 1,
        TokenRef::Token(_) => BYTES,
    });
    has_bytes.then(|| ids.max().map_or(BYTES, |ids| ids.max(BYTES)))
}

/// Shrinks adapters to the small model: newly initialized, with a rank that fits, for the modules that remain.
fn adapter(config: &mut Resolved, after: &ModelSpec) -> Option<String> {
    let adapter = config.adapter.as_mut()?;
    (adapter.path, adapter.merge) = (None, false);
    let has = |name: &String| after.modules.iter().any(|module| module.fqn.ends_with(name.as_str()));
    if let Targets::Named(names) = &mut adapter.target_modules {
        names.retain(has);
        if names.is_empty() && adapter.target_parameters.is_empty() {
            adapter.target_modules = Targets::AllLinear;
        }
    }
    adapter.modules_to_save.retain(has);
    let rank = adapter.rank;
    adapter.rank = rank.min(RANK_MAX);
    (adapter.rank < rank).then(|| format!("adapters of rank {rank} to {}", adapter.rank))
}

/// Drops patterns that match only removed modules. A pattern that never matched anything stays, to be reported.
fn drop_patterns(
    key: &str,
    patterns: &mut Vec<String>,
    before: &ModelSpec,
    after: &ModelSpec,
) -> Option<String> {
    let names = |spec: &ModelSpec, pattern: &String| {
        let Ok(pattern) = FqnPatterns::new(std::slice::from_ref(pattern)) else { return false };
        let all = |param: &fsdp_core::model::ParamSpec| {
            std::iter::once(&param.fqn).chain(&param.aliases).any(|name| pattern.matches(name))
        };
        spec.params.iter().any(all)
    };
    let is_cut = |pattern: &String| names(before, pattern) && !names(after, pattern);
    let cut: Vec<String> = patterns.iter().filter(|pattern| is_cut(pattern)).cloned().collect();
    patterns.retain(|pattern| !cut.contains(pattern));
    (!cut.is_empty()).then(|| format!("{key} without {}, which names only removed layers", cut.join(", ")))
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

#[cfg(test)]
mod tests;
