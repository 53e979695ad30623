//! The path of gradients through a micro-batch: slots, reductions, sums, norms, and the download to the host.

use std::convert::Infallible;

use super::super::policy::{Accumulation, AccumulationOrder, Offload};
use super::super::{BufferId, OpKind};
use super::Build;
use crate::dtype::DType;
use crate::layout::Segment;
use crate::mesh::{Axis, Group};
use crate::rank::Queue;
use crate::tree::{self, Counter};
use crate::wrap::UnitId;

/// Buffers that hold one gradient of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GradientBuffers {
    pub(super) buffers: Vec<BufferId>,
    /// The number of their slot; `None` for buffers that the unit owns.
    slot: Option<usize>,
}

/// One addition of a sum to an earlier one.
struct Addition {
    into: GradientBuffers,
    from: GradientBuffers,
}

/// The sums of one unit's gradients over micro-batches.
pub(super) struct Sums {
    order: AccumulationOrder,
    /// Free buffers for sums, in reverse order.
    free: Vec<Vec<BufferId>>,
    counter: Counter<GradientBuffers>,
}

impl Sums {
    pub(super) fn new(order: AccumulationOrder, mut sets: Vec<Vec<BufferId>>) -> Self {
        sets.reverse();
        Self { order, free: sets, counter: Counter::default() }
    }

    /// Takes buffers for the gradient of the next micro-batch; `None` if none are free.
    fn take(&mut self) -> Option<GradientBuffers> {
        self.free.pop().map(|buffers| GradientBuffers { buffers, slot: None })
    }

    /// Returns the additions that the gradient of the next micro-batch completes; after the last one, a single sum is
    /// left.
    fn push(&mut self, gradient: GradientBuffers, last: bool) -> Vec<Addition> {
        let mut additions = Vec::new();
        let mut add = |into: GradientBuffers, from: GradientBuffers| -> Result<GradientBuffers, Infallible> {
            additions.push(Addition { into: into.clone(), from });
            Ok(into)
        };
        let Ok(()) = self.counter.push(gradient, &mut add);
        if last || self.order == AccumulationOrder::Running {
            let Ok(sum) = self.counter.take_total(&mut add);
            let sum = sum.expect("a gradient was just pushed");
            let Ok(()) = self.counter.push(sum, &mut add);
        }
        additions
    }

    /// Takes the single sum that is left.
    fn total(&mut self) -> GradientBuffers {
        let Ok(total) =
            self.counter.take_total(|into, _| -> Result<GradientBuffers, Infallible> { Ok(into) });
        total.expect("a sum is left after the last micro-batch")
    }
}

/// The buffers of several gradients, one after the other.
fn buffers_of(gradients: &[GradientBuffers]) -> Vec<BufferId> {
    gradients.iter().flat_map(|gradient| &gradient.buffers).copied().collect()
}

/// A reduction that has been issued.
pub(super) struct Reduction {
    unit: UnitId,
    /// The unreduced gradient.
    gradient: GradientBuffers,
    /// The reduced gradient.
    result: GradientBuffers,
}

impl Build<'_> {
    /// Dtypes and lengths of the gradient of each trainable segment.
    pub(super) fn gradient_sizes(&self, unit: UnitId, len: fn(&Segment) -> usize) -> Vec<(DType, usize)> {
        let dtype = self.compiler.policy.reduce_dtype;
        self.compiler.layout.unit(unit).trainable_segments().map(|segment| (dtype, len(segment))).collect()
    }

    /// Whether unsharded gradients are accumulated, and whether sharded ones are.
    fn adds(&self) -> (bool, bool) {
        let unsharded = self.compiler.policy.accumulation == Accumulation::Unsharded;
        (self.rounds > 1 && unsharded, self.rounds > 1 && !unsharded)
    }

    /// Opens a unit's gradients, one per leaf. The first, to which the others will be added, is in a free buffer for sums
    /// if unsharded gradients are accumulated; otherwise, or if none is free, in a gradient slot, as the others are.
    pub(super) fn open_gradient(&mut self, unit: UnitId) {
        let mut sum = if self.adds().0 { self.whole_sums[unit.0].take() } else { None };
        let open: Vec<GradientBuffers> = (0..self.leaves(unit))
            .map(|_| {
                sum.take().unwrap_or_else(|| {
                    let sizes = self.gradient_sizes(unit, Segment::unsharded_len);
                    let (slot, buffers) = self.gradient_slots.take(&mut self.declared, sizes);
                    GradientBuffers { buffers, slot: Some(slot) }
                })
            })
            .collect();
        self.emit.push(OpKind::OpenGradient(unit), Vec::new(), buffers_of(&open));
        self.open.insert(unit, open);
    }

    /// Closes the complete gradients of one micro-batch and adds its leaves, then accumulates or reduces the sum.
    pub(super) fn close_gradient(&mut self, unit: UnitId, round: usize) {
        let open = self.open.remove(&unit).expect("a gradient is opened before it is closed");
        self.emit.push(OpKind::CloseGradient(unit), Vec::new(), buffers_of(&open));
        let mut gradient = tree::fold(0, open.len(), &mut |leaf| open[leaf].clone(), &mut |into, from| {
            self.add(unit, Queue::Compute, &into, &from);
            self.gradient_slots.give_back(from.slot.expect("only the first leaf is not in a slot"));
            into
        });
        if self.adds().0 {
            let last = round + 1 == self.rounds;
            for Addition { into, from } in self.whole_sums[unit.0].push(gradient, last) {
                self.add(unit, Queue::Compute, &into, &from);
                match from.slot {
                    Some(slot) => self.gradient_slots.give_back(slot),
                    None => self.whole_sums[unit.0].free.push(from.buffers),
                }
            }
            if !last {
                return;
            }
            gradient = self.whole_sums[unit.0].total();
        }
        let result = self.result(unit);
        let reduce = self.compiler.policy.reduce_op;
        let (reads, writes) = (gradient.buffers.clone(), result.buffers.clone());
        let group = self.group(unit);
        self.emit.push(OpKind::ReduceScatter { unit, reduce, group }, reads, writes);
        let origin = self.compiler.layout.unit(unit).origin;
        self.finish_reductions(round, Some(origin));
        self.pending_reductions.push(Reduction { unit, gradient, result });
    }

    fn add(&mut self, unit: UnitId, queue: Queue, into: &GradientBuffers, from: &GradientBuffers) {
        self.emit.push(OpKind::Add { unit, queue }, from.buffers.clone(), into.buffers.clone());
    }

    /// The buffers for a reduced gradient: those for sums, its lasting buffer, or a slot for the download to the host.
    fn result(&mut self, unit: UnitId) -> GradientBuffers {
        self.sums[unit.0].take().unwrap_or_else(|| {
            let sizes = self.gradient_sizes(unit, Segment::shard_len);
            let (slot, buffers) = self.reduced_slots.take(&mut self.declared, sizes);
            GradientBuffers { buffers, slot: Some(slot) }
        })
    }

    /// Accumulates the results of reductions that were issued before, except for those of a unit and its experts: these
    /// follow each other, and would wait for the latest one.
    pub(super) fn finish_reductions(&mut self, round: usize, except: Option<usize>) {
        let origin = |reduction: &Reduction| self.compiler.layout.unit(reduction.unit).origin;
        let (kept, done) = std::mem::take(&mut self.pending_reductions)
            .into_iter()
            .partition(|reduction| Some(origin(reduction)) == except);
        self.pending_reductions = kept;
        let done: Vec<Reduction> = done;
        done.into_iter().for_each(|reduction| self.finish_reduction(round, reduction));
    }

    fn finish_reduction(&mut self, round: usize, Reduction { unit, gradient, result }: Reduction) {
        if let Some(slot) = gradient.slot {
            self.gradient_slots.give_back(slot);
        }
        let last = round + 1 == self.rounds;
        let mut total = result;
        if self.adds().1 {
            for Addition { into, from } in self.sums[unit.0].push(total, last) {
                self.add(unit, Queue::Reduce, &into, &from);
                self.sums[unit.0].free.push(from.buffers);
            }
            if !last {
                return;
            }
            total = self.sums[unit.0].total();
        }
        if self.compiler.mesh.size(Axis::Replicate) > 1 {
            let reduce = self.compiler.policy.reduce_op;
            let kind = OpKind::AllReduce { unit, reduce, group: Group::REPLICATE };
            self.emit.push(kind, Vec::new(), total.buffers.clone());
            self.emit_square_norm();
            self.pending_norm = Some((unit, total));
            return;
        }
        // Without replicas there is no all-reduce to wait for.
        self.pending_norm = Some((unit, total));
        self.emit_square_norm();
    }

    /// Computes the norm of the unit whose all-reduce over replicas was issued before the latest one, then downloads
    /// its gradient to the host if state is offloaded.
    pub(super) fn emit_square_norm(&mut self) {
        let Some((unit, total)) = self.pending_norm.take() else { return };
        let scalars = vec![self.declared.lasting.scalars];
        self.emit.push(OpKind::SquareNorm(unit), total.buffers.clone(), scalars);
        if self.compiler.policy.offload == Offload::None {
            return;
        }
        let host = self.declared.lasting.units[unit.0].gradient.clone();
        self.emit.push(OpKind::Download(unit), total.buffers, host);
        if let Some(slot) = total.slot {
            self.reduced_slots.give_back(slot);
        }
    }
}
