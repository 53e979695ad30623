//! The buffers that an engine owns, and their allocation.

use super::Plan;
use crate::dtype::DType;
use crate::error::Error;
use crate::ledger::{extra_accumulators, sharded_sets};
use crate::memory::{Buffer, Category, Memory, SliceMut};
use crate::rank::Queue;
use crate::schedule::{Accumulation, AccumulationOrder, Offload, Reshard, Schedule, Slot};
use crate::state::{GradientState, ParamState};
use crate::tree::Counter;
use crate::update::{Piece, StateTensor, UpdateRule};

/// Sums of gradient sets (one buffer per trainable segment), and the sets that are free.
pub(super) struct Sums<B> {
    pub(super) order: AccumulationOrder,
    pub(super) free: Vec<Vec<B>>,
    counter: Counter<Vec<B>>,
}

impl<B: Buffer> Sums<B> {
    fn new(order: AccumulationOrder, free: Vec<Vec<B>>) -> Self {
        Self { order, free, counter: Counter::default() }
    }

    /// Adds the next micro-batch's set.
    pub(super) fn push<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        queue: Queue,
        set: Vec<B>,
    ) -> Result<(), Error> {
        let Self { order, free, counter } = self;
        let mut add = |left: Vec<B>, right: Vec<B>| add_sets(memory, queue, free, left, right);
        match order {
            AccumulationOrder::Tree => counter.push(set, add),
            AccumulationOrder::Running => {
                let sum = match counter.finish(&mut add)? {
                    Some(sum) => add(sum, set)?,
                    None => set,
                };
                counter.push(sum, |_, _| unreachable!("the counter was emptied"))
            }
        }
    }

    /// The total; the sums are empty afterwards.
    pub(super) fn total<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        queue: Queue,
    ) -> Result<Option<Vec<B>>, Error> {
        let Self { free, counter, .. } = self;
        counter.finish(|left, right| add_sets(memory, queue, free, left, right))
    }
}

fn add_sets<M: Memory>(
    memory: &M,
    queue: Queue,
    free: &mut Vec<Vec<M::Buffer>>,
    mut left: Vec<M::Buffer>,
    mut right: Vec<M::Buffer>,
) -> Result<Vec<M::Buffer>, Error> {
    for (sum, part) in left.iter_mut().zip(&mut right) {
        memory.accumulate(queue, crate::memory::Slice::whole(part), SliceMut::whole(sum))?;
        memory.release(queue, part);
    }
    free.push(right);
    Ok(left)
}

/// Where a set of reduced gradients goes when its contents are given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// To the free sets of its unit's sums.
    Sums,
    /// To a reduced slot.
    Slot(usize),
    /// To its unit's place in host memory.
    Host,
}

/// The buffers and states of one unit on one rank.
pub(super) struct UnitBuffers<B> {
    /// Master parameters, one per segment.
    pub(super) master: Vec<B>,
    /// Copies in the parameter dtype; empty when that is the master's.
    pub(super) low: Vec<B>,
    /// Parts kept after forward; empty when none are.
    pub(super) sub_shards: Vec<B>,
    /// What the shard of each segment holds.
    pub(super) pieces: Vec<Vec<Piece>>,
    /// For each trainable segment its index among all segments.
    pub(super) trainable: Vec<usize>,
    /// Optimizer state per trainable segment.
    pub(super) state: Vec<Vec<B>>,
    /// What each of its tensors holds.
    pub(super) state_tensors: Vec<Vec<StateTensor>>,
    /// Sums of sharded gradients.
    pub(super) sums: Sums<B>,
    /// Sums of unsharded gradients.
    pub(super) unsharded_sums: Sums<B>,
    /// The result of the latest reduce-scatter.
    pub(super) incoming: Option<Vec<B>>,
    /// The total of the step, per trainable segment.
    pub(super) total: Option<Vec<B>>,
    /// Where these go.
    pub(super) home: Home,
    /// Room for the total in host memory, while there is none in it; always `None` where totals stay.
    pub(super) host_gradient: Option<Vec<B>>,
    pub(super) param_state: ParamState<Vec<B>>,
    pub(super) gradient_state: GradientState<Vec<B>>,
}

/// A rank's shards of one unit.
#[derive(Debug)]
pub struct UnitShards<'a, B> {
    /// Master parameters, one per segment.
    pub params: &'a [B],
    /// What each segment's shard holds.
    pub pieces: &'a [Vec<Piece>],
    /// For each trainable segment its index among all segments.
    pub trainable: &'a [usize],
    /// The gradient of the last step per trainable segment, as it was reduced: the sum of leaves, over
    /// [`Plan::averaged_ranks`](super::Plan::averaged_ranks); `None` before the first step.
    pub gradients: Option<&'a [B]>,
    /// Optimizer state per trainable segment.
    pub state: &'a [Vec<B>],
    /// What each of its tensors is, and holds.
    pub state_tensors: &'a [Vec<StateTensor>],
}

impl<B> UnitBuffers<B> {
    pub(super) fn shards(&self) -> UnitShards<'_, B> {
        UnitShards {
            params: &self.master,
            pieces: &self.pieces,
            trainable: &self.trainable,
            gradients: self.total.as_deref(),
            state: &self.state,
            state_tensors: &self.state_tensors,
        }
    }
}

/// Allocates the buffers of one rank.
pub(super) struct Allocator<'a, M: Memory> {
    pub(super) memory: &'a M,
    pub(super) plan: &'a Plan,
    pub(super) rule: &'a dyn UpdateRule<M>,
    pub(super) shard: usize,
}

impl<M: Memory> Allocator<'_, M> {
    fn set(
        &self,
        category: Category,
        dtype: DType,
        lens: impl Iterator<Item = usize>,
    ) -> Result<Vec<M::Buffer>, Error> {
        lens.map(|len| self.memory.allocate(category, dtype, len)).collect()
    }

    /// What a rank owns: where the policy says that it lives.
    fn owned(
        &self,
        category: Category,
        dtype: DType,
        lens: impl Iterator<Item = usize>,
    ) -> Result<Vec<M::Buffer>, Error> {
        match self.plan.policy.offload {
            Offload::None => self.set(category, dtype, lens),
            Offload::Cpu => lens.map(|len| self.memory.allocate_host(category, dtype, len)).collect(),
        }
    }

    fn zeroed(
        &self,
        category: Category,
        dtype: DType,
        lens: impl Iterator<Item = usize>,
    ) -> Result<Vec<M::Buffer>, Error> {
        let mut set = self.owned(category, dtype, lens)?;
        for buffer in &mut set {
            self.memory.zero(Queue::Compute, SliceMut::whole(buffer))?;
        }
        Ok(set)
    }

    /// The slots of a schedule, empty.
    pub(super) fn slots(
        &self,
        slots: &[Slot],
        category: Category,
        dtype: DType,
    ) -> Result<Vec<Option<Vec<M::Buffer>>>, Error> {
        slots.iter().map(|slot| self.set(category, dtype, slot.lens.iter().copied()).map(Some)).collect()
    }

    /// All buffers of one unit.
    pub(super) fn unit(&self, unit: usize) -> Result<UnitBuffers<M::Buffer>, Error> {
        let Plan { layout, policy, step, .. } = self.plan;
        let segments = &layout.units[unit].segments;
        let shard_lens = || segments.iter().map(|segment| segment.shard_len());
        let master_dtype = policy.param_dtype.master();
        let master = self.zeroed(Category::ParameterShard, master_dtype, shard_lens())?;
        let low = if policy.param_dtype == master_dtype {
            Vec::new()
        } else {
            self.zeroed(Category::ParameterShard, policy.param_dtype, shard_lens())?
        };
        let sub_shards = match policy.reshard_after_forward {
            Reshard::ToGroup(n) if step.keeps_sub_shard[unit] => {
                let lens = segments.iter().map(|segment| segment.unsharded_len() / n);
                self.set(Category::Unsharded, policy.param_dtype, lens)?
            }
            _ => Vec::new(),
        };
        let pieces: Vec<Vec<Piece>> = segments.iter().map(|segment| segment.pieces(self.shard)).collect();
        let trainable: Vec<usize> = (0..segments.len()).filter(|&index| segments[index].trainable).collect();
        let (mut state, mut state_tensors) = (Vec::new(), Vec::new());
        for &segment in &trainable {
            let tensors = self.rule.state(&pieces[segment], segments[segment].shard_len(), master_dtype);
            let mut buffers = Vec::new();
            for tensor in &tensors {
                let len = std::iter::once(tensor.len);
                buffers.extend(self.zeroed(Category::OptimizerState, tensor.dtype, len)?);
            }
            state.push(buffers);
            state_tensors.push(tensors);
        }
        let [sums, unsharded_sums] = self.sums(unit)?;
        let gradient_lens = trainable.iter().map(|&segment| segments[segment].shard_len());
        let host_gradient = match policy.offload {
            Offload::None => None,
            Offload::Cpu => {
                Some(self.owned(Category::ShardedGradient, policy.reduce_dtype, gradient_lens)?)
            }
        };
        Ok(UnitBuffers {
            master,
            low,
            sub_shards,
            pieces,
            trainable,
            state,
            state_tensors,
            sums,
            unsharded_sums,
            incoming: None,
            total: None,
            home: Home::Sums,
            host_gradient,
            param_state: ParamState::default(),
            gradient_state: GradientState::default(),
        })
    }

    /// The sums of sharded and of unsharded gradients of one unit.
    fn sums(&self, unit: usize) -> Result<[Sums<M::Buffer>; 2], Error> {
        let Plan { layout, policy, step, .. } = self.plan;
        let dtype = policy.reduce_dtype;
        let trainable = || layout.units[unit].trainable_segments();
        let sharded = |category| self.set(category, dtype, trainable().map(|segment| segment.shard_len()));
        let (lasting, accumulators) = sharded_sets(policy, step.rounds);
        let categories = [(Category::ShardedGradient, lasting), (Category::Accumulator, accumulators)];
        let of_kind = |(category, count)| (0..count).map(move |_| sharded(category));
        let sharded = categories.into_iter().flat_map(of_kind).collect::<Result<Vec<_>, _>>()?;
        let extra = match policy.accumulation {
            Accumulation::Reduce => 0,
            Accumulation::Unsharded => extra_accumulators(policy, step.rounds),
        };
        let unsharded = |_| {
            let lens = trainable().map(|segment| segment.unsharded_len());
            self.set(Category::Accumulator, dtype, lens)
        };
        let unsharded = (0..extra).map(unsharded).collect::<Result<Vec<_>, _>>()?;
        let order = policy.accumulation_order;
        Ok([Sums::new(order, sharded), Sums::new(order, unsharded)])
    }
}

/// Which of the engine's slots the slots of a schedule are.
pub(super) struct SlotMap {
    /// Unsharded slots.
    pub(super) unsharded: Vec<usize>,
    /// Staging slots.
    pub(super) staging: Vec<usize>,
}

impl SlotMap {
    /// The slots of `schedule` among those of `step`, the schedule that the engine's slots were made for.
    pub(super) fn new(step: &Schedule, schedule: &Schedule) -> Self {
        Self {
            unsharded: map_slots(&step.slots, &schedule.slots),
            staging: map_slots(&step.staging_slots, &schedule.staging_slots),
        }
    }
}

/// For every slot of `theirs` a different one of `ours` with the same lengths.
///
/// # Panics
/// When there is none: an evaluation needs no more slots than training.
fn map_slots(ours: &[Slot], theirs: &[Slot]) -> Vec<usize> {
    let mut taken = vec![false; ours.len()];
    theirs
        .iter()
        .map(|slot| {
            let index = (0..ours.len())
                .find(|&index| !taken[index] && ours[index] == *slot)
                .expect("an evaluation needs no more slots than training");
            taken[index] = true;
            index
        })
        .collect()
}
