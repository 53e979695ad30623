//! What each operation reads and writes, as a table that keeps no books.
//!
//! Compiler and checker take their accesses from one [`Tenancy`](crate::schedule::Tenancy), so a mistake there
//! is invisible to both. This table is written from the meaning of the operations and finds slots by looking
//! back along the schedule.

use std::collections::BTreeSet;

use crate::model::BlockId;
use crate::schedule::Resource::{
    GradientSlot, GradientStay, Incoming, ReducedSlot, Scalars, Shard, ShardedGradient, Slot, StagingSlot,
    Statistics, Stay, SubShard, UnshardedSums,
};
use crate::schedule::{Access, Op, OpKind, Resource, Source};
use crate::testing::Built;

/// What the last of `ops` touches.
pub(super) fn of_last(built: &Built, ops: &[Op]) -> BTreeSet<Access> {
    let slot = |unit: usize| Slot(latest(ops, |kind| gathered(kind, unit)));
    let gradient = |unit: usize| GradientSlot(latest(ops, |kind| opened(kind, unit)));
    let units = 0..built.layout.units.len();
    let slots_of = |block: BlockId| built.units_of(block.0).into_iter().map(slot).collect();
    let gradients_of = |block: BlockId| trained(built, block).into_iter().map(gradient).collect();
    let (reads, writes): (Vec<Resource>, Vec<Resource>) = match ops.last().expect("an operation").kind {
        OpKind::BeginStep => (vec![], units.flat_map(|unit| [Shard(unit), ShardedGradient(unit)]).collect()),
        OpKind::BeginMicroBatch { .. } => (vec![], vec![]),
        OpKind::Upload { unit, staging } => (vec![Shard(unit)], vec![StagingSlot(staging), Stay(unit)]),
        OpKind::AllGather { unit, slot, source: Source::Staged(_), .. } => {
            let uploaded = latest(ops, |kind| match *kind {
                OpKind::Upload { unit: found, staging } if found == unit => Some(staging),
                _ => None,
            });
            (vec![StagingSlot(uploaded)], vec![Slot(slot), Stay(unit)])
        }
        OpKind::AllGather { unit, slot, source: Source::Shard, .. } => {
            (vec![Shard(unit)], vec![Slot(slot), Stay(unit)])
        }
        OpKind::AllGather { unit, slot, source: Source::SubShard, .. } => {
            (vec![SubShard(unit)], vec![Slot(slot), Stay(unit)])
        }
        OpKind::Forward { block, .. } => (slots_of(block), vec![]),
        OpKind::Finish { block, backward: false } => (slots_of(block), vec![Scalars]),
        OpKind::Finish { block, backward: true } => {
            let mut writes: Vec<Resource> = gradients_of(block);
            writes.push(Scalars);
            (slots_of(block), writes)
        }
        OpKind::Backward { block } => (slots_of(block), gradients_of(block)),
        OpKind::KeepSubShard { unit } => (vec![slot(unit)], vec![SubShard(unit)]),
        OpKind::Reshard { unit } => (vec![], vec![slot(unit), Stay(unit)]),
        OpKind::OpenGradient { unit, slot } => (vec![], vec![GradientSlot(slot), GradientStay(unit)]),
        OpKind::CloseGradient { unit } => (vec![], vec![gradient(unit)]),
        OpKind::FoldUnsharded { unit, .. } => (vec![], vec![gradient(unit), UnshardedSums(unit)]),
        OpKind::ReduceScatter { unit, slot } => {
            let mut writes = vec![gradient(unit), GradientStay(unit), Incoming(unit)];
            writes.extend(slot.map(ReducedSlot));
            (vec![], writes)
        }
        OpKind::Fold { unit, .. } => (vec![], vec![Incoming(unit), ShardedGradient(unit)]),
        OpKind::AllReduceReplicas { unit } => (vec![], vec![ShardedGradient(unit)]),
        OpKind::Download { unit, .. } => {
            let reduced = latest(ops, |kind| match *kind {
                OpKind::ReduceScatter { unit: found, slot } if found == unit => Some(slot),
                _ => None,
            });
            let mut writes = vec![ShardedGradient(unit)];
            writes.extend(reduced.map(ReducedSlot));
            (vec![], writes)
        }
        OpKind::SquareNorm { unit } => (vec![ShardedGradient(unit)], vec![Scalars]),
        OpKind::ReduceScalars => (vec![], vec![Scalars]),
        OpKind::Statistics { unit, phase } => {
            let mut reads = vec![ShardedGradient(unit), Scalars];
            reads.extend((0..phase).map(Statistics));
            (reads, vec![Shard(unit), Statistics(phase)])
        }
        OpKind::ReduceStatistics { phase } => (vec![], vec![Statistics(phase)]),
        OpKind::Update { unit } => {
            let mut reads = vec![ShardedGradient(unit), Scalars];
            reads.extend((0..built.phases).map(Statistics));
            (reads, vec![Shard(unit)])
        }
    };
    let reads = reads.into_iter().map(|resource| Access { resource, write: false });
    reads.chain(writes.into_iter().map(|resource| Access { resource, write: true })).collect()
}

/// The slot that the latest matching operation took.
fn latest<T>(ops: &[Op], taken: impl Fn(&OpKind) -> Option<T>) -> T {
    ops.iter().rev().find_map(|op| taken(&op.kind)).expect("the unit has a slot")
}

fn gathered(kind: &OpKind, wanted: usize) -> Option<usize> {
    match *kind {
        OpKind::AllGather { unit, slot, .. } if unit == wanted => Some(slot),
        _ => None,
    }
}

fn opened(kind: &OpKind, wanted: usize) -> Option<usize> {
    match *kind {
        OpKind::OpenGradient { unit, slot } if unit == wanted => Some(slot),
        _ => None,
    }
}

/// The units in which a block writes gradients.
fn trained(built: &Built, block: BlockId) -> Vec<usize> {
    let params = built.spec.blocks[block.0].params.iter();
    params.filter(|&&id| built.spec.param(id).trainable).map(|&id| built.unit_of(id)).collect()
}
