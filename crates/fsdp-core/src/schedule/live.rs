//! Live ranges: the time spans within one micro-batch in which each unit is unsharded.
//!
//! The compute steps of a micro-batch are a fixed list: forward of all blocks, the last block, then backward with
//! recomputation before each checkpointed layer. A unit is live from its first to its last use in forward, and again in
//! backward; the two ranges merge when the last block uses the unit or the policy keeps it.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;
use super::policy::{Policy, Reshard};
use crate::collective::Purpose;
use crate::layout::Layout;
use crate::model::{ModelSpec, ParamId};
use crate::program::{BlockCall, Pass, calls};
use crate::wrap::UnitId;

/// One compute step of a micro-batch and the units it uses.
#[derive(Clone, Debug)]
pub(super) struct ComputeStep {
    pub(super) call: BlockCall,
    /// Units whose parameters are read.
    pub(super) units: Vec<UnitId>,
    /// Trainable units whose gradients are written.
    pub(super) gradients: Vec<UnitId>,
}

/// A range of steps in which a unit is unsharded.
#[derive(Clone, Debug)]
pub(super) struct LiveRange {
    pub(super) unit: UnitId,
    pub(super) source: Source,
    pub(super) purpose: Purpose,
    /// First step that uses the unit.
    pub(super) from: usize,
    /// Last step that uses it.
    pub(super) to: usize,
    /// Whether a sub-shard is kept at the end.
    pub(super) keep_sub_shard: bool,
}

/// The steps of one micro-batch.
pub(super) fn compute_steps(spec: &ModelSpec, layout: &Layout, pass: Pass) -> Vec<ComputeStep> {
    calls(spec, pass).into_iter().map(|call| compute_step(spec, layout, call)).collect()
}

fn compute_step(spec: &ModelSpec, layout: &Layout, call: BlockCall) -> ComputeStep {
    let params: Vec<ParamId> = layout.called(&spec.block(call.block()).params).collect();
    let unit_of = |id| layout.find(id).expect("every parameter lies in a unit").0;
    let units: BTreeSet<UnitId> = params.iter().map(|&id| unit_of(id)).collect();
    let is_trained = |id: &&ParamId| call.is_backward() && spec.param(**id).trainable;
    let gradients: BTreeSet<UnitId> = params.iter().filter(is_trained).map(|&id| unit_of(id)).collect();
    ComputeStep { call, units: units.into_iter().collect(), gradients: gradients.into_iter().collect() }
}

/// The live ranges of all units, in the order of their first use.
pub(super) fn live_ranges(layout: &Layout, steps: &[ComputeStep], policy: &Policy) -> Vec<LiveRange> {
    let last_block =
        steps.iter().position(|step| step.call.is_last()).expect("every micro-batch has a last block");
    let mut all: Vec<LiveRange> = Vec::new();
    let mut all_uses = vec![Vec::new(); layout.units.len()];
    for (at, step) in steps.iter().enumerate() {
        step.units.iter().for_each(|&unit| all_uses[unit.0].push(at));
    }
    for ((unit, unit_layout), uses) in layout.unit_ids().zip(&layout.units).zip(all_uses) {
        let forward = span(uses.iter().copied().filter(|&at| at <= last_block));
        let backward = span(uses.iter().copied().filter(|&at| at >= last_block));
        let keep = match policy.reshard_after_forward {
            Reshard::Never => true,
            Reshard::Auto => unit_layout.is_root,
            Reshard::Always | Reshard::ToGroup(_) => false,
        };
        let sub_shard = policy.reshard_after_forward.sub_group(unit_layout).is_some();
        let range = |(from, to), source, purpose, keep_sub_shard| LiveRange {
            unit,
            source,
            purpose,
            from,
            to,
            keep_sub_shard,
        };
        match (forward, backward) {
            (Some(f), Some(b)) if keep || f.1 == b.0 => {
                all.push(range((f.0, b.1), Source::Shard, Purpose::Forward, false));
            }
            (Some(f), Some(b)) => {
                let source = if sub_shard { Source::SubShard } else { Source::Shard };
                all.push(range(f, Source::Shard, Purpose::Forward, sub_shard));
                all.push(range(b, source, Purpose::Backward, false));
            }
            (Some(f), None) => all.push(range(f, Source::Shard, Purpose::Forward, false)),
            // Backward reads only what forward read.
            (None, _) => {}
        }
    }
    all.sort_by_key(|range| (range.from, range.unit));
    all
}

fn span(mut uses: impl Iterator<Item = usize>) -> Option<(usize, usize)> {
    let first = uses.next()?;
    Some((first, uses.last().unwrap_or(first)))
}

/// For each live range, the step before which its all-gather is issued.
///
/// Gathers for forward are issued `forward_prefetch` units ahead. Backward starts with the last block: its gathers are
/// issued `backward_prefetch` units ahead, where the last block counts as the first unit. A unit counts together with its
/// experts, which are gathered with it.
pub(super) fn issue_points(
    layout: &Layout,
    steps: &[ComputeStep],
    ranges: &[LiveRange],
    policy: &Policy,
) -> Vec<usize> {
    let last_block = steps.iter().position(|step| step.call.is_last()).unwrap_or(0);
    let origin = |range: &LiveRange| layout.unit(range.unit).origin;
    // The units of each pass in the order of their first use, and the step of that use.
    let mut units: BTreeMap<bool, Vec<(Option<usize>, usize)>> = BTreeMap::new();
    units.insert(false, vec![(None, last_block)]);
    let is_forward = |range: &LiveRange| range.purpose == Purpose::Forward;
    for range in ranges {
        let of_pass = units.entry(is_forward(range)).or_default();
        if of_pass.iter().all(|(unit, _)| *unit != Some(origin(range))) {
            of_pass.push((Some(origin(range)), range.from));
        }
    }
    let issue = |range: &LiveRange| {
        let (of_pass, unit) = (&units[&is_forward(range)], Some(origin(range)));
        let at = of_pass.iter().position(|(other, _)| *other == unit).expect("every unit was noted");
        let ahead = if is_forward(range) { policy.forward_prefetch } else { policy.backward_prefetch };
        of_pass[at.saturating_sub(ahead)].1
    };
    ranges.iter().map(issue).collect()
}
