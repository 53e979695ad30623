//! Closed forms for the communication of a step, written independently of the schedule compiler.
//!
//! With n ranks in a group, a rank sends (n - 1) / n of the unsharded bytes in an all-gather or a reduce-scatter, and
//! 2 (n - 1) / n of the bytes in an all-reduce. In an all-to-all or a broadcast it sends (n - 1) / n of the bytes, on average.

use std::ops::RangeInclusive;

use fsdp_core::comm::Traffic;
use fsdp_core::layout::Segment;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::{Accumulation, Checkpointing, Reshard};
use fsdp_core::update::RuleDecl;
use fsdp_core::{Axis, DType};
use fsdp_nn::model::Architecture;
use fsdp_nn::op::{Exchange, ExpertAxis, Op, Rounds, RouterTerms};

use crate::error::TrainError;
use crate::job::{Job, listed};

/// The communication of one rank in one training step with an update rule.
pub(super) fn expected_traffic(plan: &Plan, rule: &RuleDecl) -> Traffic {
    let mut traffic = Traffic::default();
    let (replicas, world) = (plan.mesh.size(Axis::Replicate), plan.mesh.world());
    let rounds = plan.step.rounds;
    let blocks = &plan.spec.blocks;
    let trains = |unit: usize| plan.layout.units[unit].is_trainable();
    let first_reread = first_reread_block(plan);
    for (index, unit) in plan.layout.units.iter().enumerate() {
        // The ranks that hold the unit, or on an expert axis a block of its experts, together.
        let shards = plan.mesh.shards() / unit.blocks;
        let owned = |block: usize| {
            blocks[block]
                .params
                .iter()
                .any(|&id| plan.layout.find(id).is_some_and(|(owner, ..)| owner.0 == index))
        };
        let bytes: usize = unit.segments.iter().map(|segment| segment.unsharded_bytes()).sum();
        let in_last = owned(blocks.len() - 1);
        let in_backward = (first_reread..blocks.len()).any(owned);
        let keeps = match plan.policy.reshard_after_forward {
            Reshard::Never => true,
            Reshard::Auto => unit.is_root,
            Reshard::Always | Reshard::ToGroup(_) => false,
        };
        add_gather(&mut traffic, rounds, bytes, shards);
        if in_backward && !in_last && !keeps {
            let group = match plan.policy.reshard_after_forward {
                Reshard::ToGroup(n) if shards.is_multiple_of(n) => n,
                _ => shards,
            };
            add_gather(&mut traffic, rounds, bytes, group);
        }
        if trains(index) {
            let elements: usize = unit.trainable_segments().map(|segment| segment.unsharded_len()).sum();
            let bytes = elements * plan.policy.reduce_dtype.size_bytes();
            let reductions = match plan.policy.accumulation {
                Accumulation::Reduce => rounds,
                Accumulation::Unsharded => 1,
            };
            traffic.reduce_scatters += reductions as u64;
            traffic.reduce_scatter_bytes += (reductions * (bytes / shards) * (shards - 1)) as u64;
            if replicas > 1 {
                add_all_reduce(&mut traffic, bytes / shards, replicas);
            }
        }
        // Update directions are gathered by segment, for segments with a parameter that needs them whole.
        let is_whole =
            |segment: &&Segment| segment.params.iter().any(|place| rule.whole.contains(&place.param));
        let elements: usize =
            unit.trainable_segments().filter(is_whole).map(|segment| segment.unsharded_len()).sum();
        if elements > 0 {
            add_gather(&mut traffic, 1, elements * plan.policy.reduce_dtype.size_bytes(), shards);
        }
    }
    add_all_reduce(&mut traffic, plan.spec.tallies.scalar_words() * 8, world);
    for &len in &rule.phases {
        add_all_reduce(&mut traffic, len * 8, plan.mesh.shards());
    }
    traffic
}

/// The communication of one rank in one training step within blocks.
pub(super) struct Exchanges {
    pub(super) fixed: Traffic,
    /// How many rounds send rows to experts, which the routers decide, and the bytes of each.
    rounds: RangeInclusive<u64>,
    round_bytes: u64,
}

impl Exchanges {
    /// The rounds among some all-to-alls of so many steps and ranks: all of them, if there can be that many.
    pub(super) fn rounds(&self, all_to_alls: u64, steps: u64) -> Traffic {
        let rounds = all_to_alls.clamp(steps * self.rounds.start(), steps * self.rounds.end());
        Traffic { all_to_alls: rounds, all_to_all_bytes: rounds * self.round_bytes, ..Traffic::default() }
    }

    /// Adds rounds. All mixtures of a model have rows of one size.
    fn add_rounds(&mut self, times: usize, rounds: Rounds, value_bytes: usize) {
        let times = times as u64;
        self.rounds = self.rounds.start() + times..=self.rounds.end() + times * rounds.most() as u64;
        let others = rounds.sent() / rounds.ranks() * (rounds.ranks() - 1);
        self.round_bytes = (others * value_bytes) as u64;
    }
}

/// The communication of one rank in one training step within blocks: all-to-alls between the chunks of samples, all-gathers of
/// routers' loads for a balancing loss, and of rows for experts, whose sums are reduce-scattered; or rounds of all-to-alls.
///
/// # Errors
/// Errors of the model.
pub(super) fn exchanges<A: Architecture + Clone>(job: &Job<A>) -> Result<Exchanges, TrainError> {
    let mut exchanges = Exchanges { fixed: Traffic::default(), rounds: 0..=0, round_bytes: 0 };
    let mesh = job.plan.mesh;
    if mesh.size(Axis::Context) * mesh.expert() == 1 {
        return Ok(exchanges);
    }
    let (shape, calls) = listed(&job.config, &job.architecture, &job.plan)?;
    let (rounds, value_bytes) = (job.plan.step.rounds, shape.dtype.size_bytes());
    let mut traffic = Traffic::default();
    for step in calls.iter().flat_map(|(_, listing)| &listing.list.steps) {
        match step.call.op {
            Op::Exchange(Exchange { chunks, here, part }) => {
                traffic.all_to_alls += rounds as u64;
                let sent = here * (chunks - here) * part * value_bytes;
                traffic.all_to_all_bytes += (rounds * sent) as u64;
            }
            Op::ExpertAxis(ExpertAxis::AllGather { ranks, len }) => {
                add_gather(&mut traffic, rounds, ranks * len * value_bytes, ranks);
            }
            Op::ExpertAxis(ExpertAxis::AllGatherRoutes { ranks, len }) => {
                add_gather(&mut traffic, rounds, ranks * len * DType::U32.size_bytes(), ranks);
            }
            Op::ExpertAxis(ExpertAxis::ReduceScatter { ranks, len }) => {
                traffic.reduce_scatters += rounds as u64;
                traffic.reduce_scatter_bytes += (rounds * len * value_bytes * (ranks - 1)) as u64;
            }
            Op::ExpertAxis(ExpertAxis::Send(sent) | ExpertAxis::Return(sent)) => {
                exchanges.add_rounds(rounds, sent, value_bytes);
            }
            _ => {}
        }
    }
    let description = job.architecture.description();
    let terms = description.router_terms(job.config.train.loss_terms(description));
    let is_shared = mesh.size(Axis::Context) > 1;
    if let Some(terms) = terms.and_then(RouterTerms::balancing).filter(|_| is_shared) {
        let bytes = job.plan.policy.chunks * terms.loads_len() * DType::F64.size_bytes();
        add_gather(&mut traffic, job.plan.step.rounds, bytes, job.plan.mesh.size(Axis::Context));
    }
    Ok(Exchanges { fixed: traffic, ..exchanges })
}

/// The communication of one rank before the first step, if initial parameters are read from files: the shards of every
/// unit are broadcast to all replicas.
pub(super) fn expected_loading_traffic(plan: &Plan) -> Traffic {
    let mut traffic = Traffic::default();
    let replicas = plan.mesh.size(Axis::Replicate);
    if replicas > 1 {
        for unit in &plan.layout.units {
            let kept = |segment: &Segment| {
                segment.shard_len() * plan.policy.kept_segment_dtype(segment).size_bytes()
            };
            let bytes: usize = unit.segments.iter().map(kept).sum();
            traffic.broadcasts += 1;
            traffic.broadcast_bytes += (bytes * (replicas - 1) / replicas) as u64;
        }
    }
    traffic
}

/// The first block whose parameters backward reads: the first trained one or, if layers are recomputed, the first of
/// its layer.
fn first_reread_block(plan: &Plan) -> usize {
    let blocks = &plan.spec.blocks;
    let first = plan.spec.first_trainable_block().map_or(blocks.len(), |block| block.0);
    let layer = blocks.get(first).and_then(|block| block.layer);
    match plan.policy.checkpointing {
        Checkpointing::Full | Checkpointing::Selective if layer.is_some() => {
            blocks.iter().position(|block| block.layer == layer).unwrap_or(first)
        }
        _ => first,
    }
}

fn add_gather(traffic: &mut Traffic, times: usize, bytes: usize, group: usize) {
    traffic.all_gathers += times as u64;
    traffic.all_gather_bytes += (times * (bytes / group) * (group - 1)) as u64;
}

fn add_all_reduce(traffic: &mut Traffic, bytes: usize, group: usize) {
    traffic.all_reduces += 1;
    traffic.all_reduce_bytes += (2 * bytes * (group - 1) / group) as u64;
}
