//! The buffers of one collective, and the movement of their elements.
//!
//! In an all-gather, an all-to-all or a broadcast, the last rank to arrive copies for all ranks. A reduction is folded on arrival: a
//! rank whose sibling in the tree has arrived adds the two and releases one of them at once, so memory is freed early
//! and the work is spread over the ranks; the rank that completes the root distributes the sum. For an average, every
//! rank first scales its own input, in place. No element is moved under a lock.
//!
//! Ranks may have devices with their own queues: events carry the order of every rank's gather queue (all-gathers) or
//! reduce queue (all others) to the rank that moves the data, and from there to all ranks.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fsdp_core::comm::{CollectiveKind, CommError, Fingerprint};
use fsdp_core::memory::{Arithmetic, Buffer, Memory, Slice, SliceMut};
use fsdp_core::tree::{Arrival, Arrivals};
use fsdp_core::{Error, Queue, Rank};

use crate::lock::lock;

/// What a rank deposits for a collective, and takes back afterwards.
pub(super) struct Contribution<M: Memory> {
    pub(super) inputs: Vec<M::Buffer>,
    pub(super) outputs: Vec<M::Buffer>,
    /// Its color in a split; afterwards the colors of all ranks.
    pub(super) colors: Arc<[usize]>,
    /// When its buffers may be used.
    pub(super) ready: M::Event,
}

impl<M: Memory> Contribution<M> {
    /// Buffers that may be used once `ready` has passed.
    pub(super) fn new(inputs: Vec<M::Buffer>, outputs: Vec<M::Buffer>, ready: M::Event) -> Self {
        Self { inputs, outputs, colors: Arc::default(), ready }
    }
}

/// A partial sum, in the buffers of one of the ranks it covers.
struct Partial<M: Memory> {
    owner: usize,
    buffers: Vec<M::Buffer>,
    ready: M::Event,
}

/// One collective of a group.
pub(super) struct Exchange<M: Memory> {
    /// Whether the work is done, so that ranks may leave.
    pub(super) is_done: AtomicBool,
    /// Whether the outputs of an all-gather share storage, if the memory supports it.
    share: bool,
    arrived: AtomicUsize,
    slots: Mutex<Vec<Option<Contribution<M>>>>,
    tree: Mutex<Arrivals<Partial<M>>>,
}

impl<M: Memory> Exchange<M> {
    /// Creates a collective of `size` ranks.
    pub(super) fn new(size: usize, share: bool) -> Self {
        let slots = Mutex::new((0..size).map(|_| None).collect());
        let (is_done, arrived) = Default::default();
        Self { is_done, share, arrived, slots, tree: Mutex::new(Arrivals::new(size)) }
    }

    /// Deposits the buffers of a rank and does the work that this makes possible; returns whether the collective is
    /// complete.
    pub(super) fn arrive(
        &self,
        memory: &M,
        group: GroupCall<'_>,
        index: usize,
        slot: Contribution<M>,
    ) -> Result<bool, Error> {
        let is_last = self.deposit(index, slot);
        match group.call.kind {
            CollectiveKind::ReduceScatter(_) | CollectiveKind::AllReduce(_) => {
                return self.reduce(memory, group, index);
            }
            _ if !is_last => {}
            CollectiveKind::AllGather => self.gather(memory, group)?,
            CollectiveKind::AllToAll => self.exchange_parts(memory, group)?,
            CollectiveKind::Broadcast { root } => self.broadcast(memory, group, root as usize)?,
            CollectiveKind::Split => self.distribute_colors(),
            CollectiveKind::Connect => unreachable!("threads are connected from the start"),
        }
        Ok(is_last)
    }

    /// Deposits the buffers of a rank; returns whether it is the last one.
    fn deposit(&self, index: usize, slot: Contribution<M>) -> bool {
        let mut slots = lock(&self.slots);
        assert!(slots[index].replace(slot).is_none(), "a rank enters a collective once");
        self.arrived.fetch_add(1, Ordering::Relaxed) + 1 == slots.len()
    }

    /// Takes back a rank's contribution, once the collective is finished.
    pub(super) fn take(&self, index: usize) -> Contribution<M> {
        lock(&self.slots)[index].take().expect("a rank leaves a collective once")
    }

    /// After all ranks have arrived: gives every rank the colors of all.
    fn distribute_colors(&self) {
        let mut slots = lock(&self.slots);
        let colors: Arc<[usize]> =
            slots.iter().flatten().flat_map(|slot| slot.colors.iter().copied()).collect();
        slots.iter_mut().flatten().for_each(|slot| slot.colors = colors.clone());
    }

    /// After all ranks have arrived: fills all outputs of an all-gather. If they share storage, one output is filled
    /// and the others become its readers.
    fn gather(&self, memory: &M, group: GroupCall<'_>) -> Result<(), Error> {
        self.with_all_slots(memory, Queue::Gather, |slots| {
            let inputs: Vec<_> = slots.iter_mut().map(|slot| std::mem::take(&mut slot.inputs)).collect();
            group.check_lengths(&inputs)?;
            let (first, others) = slots.split_first_mut().expect("a group has a rank");
            concatenate(memory, &inputs, &mut first.outputs)?;
            for slot in others {
                if self.share {
                    copy_or_share(memory, Queue::Gather, &first.outputs, &mut slot.outputs, true)?;
                } else {
                    concatenate(memory, &inputs, &mut slot.outputs)?;
                }
            }
            Ok(())
        })
    }

    /// After all ranks have arrived: gives every rank its part of every input.
    fn exchange_parts(&self, memory: &M, group: GroupCall<'_>) -> Result<(), Error> {
        let queue = group.call.queue();
        self.with_all_slots(memory, queue, |slots| {
            let inputs: Vec<_> = slots.iter_mut().map(|slot| std::mem::take(&mut slot.inputs)).collect();
            group.check_lengths(&inputs)?;
            for (index, slot) in slots.iter_mut().enumerate() {
                for (from, input) in inputs.iter().enumerate() {
                    for (input, output) in input.iter().zip(&mut slot.outputs) {
                        let part = output.len() / group.members.len();
                        let (src, dst) = (index * part, from * part);
                        memory.copy(queue, Slice::new(input, src, part), SliceMut::new(output, dst, part))?;
                    }
                }
            }
            Ok(())
        })
    }

    /// After all ranks have arrived: copies the outputs of the rank at index `root` to all others.
    fn broadcast(&self, memory: &M, group: GroupCall<'_>, root: usize) -> Result<(), Error> {
        self.with_all_slots(memory, Queue::Reduce, |slots| {
            let sent = std::mem::take(&mut slots[root].outputs);
            let copied = slots.iter_mut().enumerate().filter(|&(index, _)| index != root).try_for_each(
                |(index, slot)| {
                    group.check_pair(&sent, index, &slot.outputs)?;
                    copy_or_share(memory, Queue::Reduce, &sent, &mut slot.outputs, false)
                },
            );
            slots[root].outputs = sent;
            copied
        })
    }

    /// Adds the input of a rank to the tree, as far as its siblings have arrived; returns whether this completed the
    /// sum, which has then been distributed.
    fn reduce(&self, memory: &M, group: GroupCall<'_>, index: usize) -> Result<bool, Error> {
        let (buffers, ready) = {
            let mut slots = lock(&self.slots);
            let slot = slots[index].as_mut().expect("the rank deposited its buffers before");
            (std::mem::take(group.summed(slot)), slot.ready.clone())
        };
        let mut partial = self.prepare(memory, group, Partial { owner: index, buffers, ready })?;
        let mut node = index;
        loop {
            let arrival = lock(&self.tree).arrive(node, partial);
            match arrival {
                Arrival::Kept => return Ok(false),
                Arrival::Done(sum) => {
                    self.distribute_sum(memory, group, sum)?;
                    return Ok(true);
                }
                Arrival::Add { left, right, node: parent } => {
                    partial = self.add(memory, group, left, right)?;
                    node = parent;
                }
            }
        }
    }

    /// Prepares a rank's input for a reduction: scales it for an average.
    fn prepare(&self, memory: &M, group: GroupCall<'_>, mut input: Partial<M>) -> Result<Partial<M>, Error> {
        let op = group.call.kind.reduce_op();
        let Some(factor) = op.and_then(|op| op.factor(group.members.len())) else { return Ok(input) };
        memory.wait(Queue::Reduce, &input.ready);
        for buffer in &mut input.buffers {
            memory.compute(Queue::Reduce, Arithmetic::Scale(factor), SliceMut::whole(buffer))?;
        }
        input.ready = memory.record(Queue::Reduce);
        Ok(input)
    }

    /// Computes `left + right` in the buffers of `left`; returns those of `right` to their rank.
    fn add(
        &self,
        memory: &M,
        group: GroupCall<'_>,
        mut left: Partial<M>,
        mut right: Partial<M>,
    ) -> Result<Partial<M>, Error> {
        group.check_pair(&left.buffers, right.owner, &right.buffers)?;
        memory.wait(Queue::Reduce, &left.ready);
        memory.wait(Queue::Reduce, &right.ready);
        for (dst, src) in left.buffers.iter_mut().zip(&right.buffers) {
            memory.compute(Queue::Reduce, Arithmetic::Accumulate(Slice::whole(src)), SliceMut::whole(dst))?;
        }
        if group.scatters() {
            right.buffers.iter_mut().for_each(|buffer| memory.release(Queue::Reduce, buffer));
        }
        self.give_back(group, right);
        left.ready = memory.record(Queue::Reduce);
        Ok(left)
    }

    /// Distributes the sum to all ranks: a part each, or the whole. (It is ready on the queue of the calling rank,
    /// which added its last two parts.)
    fn distribute_sum(&self, memory: &M, group: GroupCall<'_>, mut sum: Partial<M>) -> Result<(), Error> {
        self.with_all_slots(memory, Queue::Reduce, |slots| {
            for (index, slot) in slots.iter_mut().enumerate() {
                if group.scatters() {
                    scatter(memory, &sum.buffers, index, &mut slot.outputs)?;
                } else if index != sum.owner {
                    copy_or_share(memory, Queue::Reduce, &sum.buffers, &mut slot.outputs, false)?;
                }
            }
            Ok(())
        })?;
        if group.scatters() {
            sum.buffers.iter_mut().for_each(|buffer| memory.release(Queue::Reduce, buffer));
        }
        self.give_back(group, sum);
        Ok(())
    }

    fn give_back(&self, group: GroupCall<'_>, partial: Partial<M>) {
        let mut slots = lock(&self.slots);
        let slot = slots[partial.owner].as_mut().expect("slots are filled until the end");
        *group.summed(slot) = partial.buffers;
    }

    /// Works on the buffers of all ranks outside the lock, after they are ready; records when they are ready again.
    fn with_all_slots(
        &self,
        memory: &M,
        queue: Queue,
        work: impl FnOnce(&mut [Contribution<M>]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut slots: Vec<Contribution<M>> =
            lock(&self.slots).iter_mut().map(|slot| slot.take().expect("all ranks have arrived")).collect();
        slots.iter().for_each(|slot| memory.wait(queue, &slot.ready));
        let result = work(&mut slots);
        let done = memory.record(queue);
        for (target, slot) in lock(&self.slots).iter_mut().zip(slots) {
            *target = Some(Contribution { ready: done.clone(), ..slot });
        }
        result
    }
}

/// The members of a group, and their call.
#[derive(Clone, Copy)]
pub(super) struct GroupCall<'a> {
    pub(super) members: &'a [Rank],
    pub(super) call: Fingerprint,
}

impl GroupCall<'_> {
    /// Whether the reduction ends in parts and gives up its inputs; otherwise it works in place.
    fn scatters(&self) -> bool {
        matches!(self.call.kind, CollectiveKind::ReduceScatter(_))
    }

    /// The buffers that a reduction adds: the inputs, or the outputs if it works in place.
    fn summed<M: Memory>(self, slot: &mut Contribution<M>) -> &mut Vec<M::Buffer> {
        if self.scatters() { &mut slot.inputs } else { &mut slot.outputs }
    }

    /// Fingerprints compare only the total number of elements; this compares each segment.
    fn check_lengths<B: Buffer>(&self, inputs: &[Vec<B>]) -> Result<(), Error> {
        inputs.iter().enumerate().try_for_each(|(index, theirs)| self.check_pair(&inputs[0], index, theirs))
    }

    fn check_pair<B: Buffer>(&self, ours: &[B], index: usize, theirs: &[B]) -> Result<(), Error> {
        let lengths = |buffers: &[B]| -> Vec<usize> { buffers.iter().map(Buffer::len).collect() };
        let (ours, theirs) = (lengths(ours), lengths(theirs));
        let segment = (0..ours.len().max(theirs.len())).find(|&i| ours.get(i) != theirs.get(i));
        let Some(segment) = segment else { return Ok(()) };
        let length = |lengths: &[usize]| lengths.get(segment).copied().unwrap_or(0);
        let (expected, got) = (length(&ours), length(&theirs));
        let rank = self.members[index];
        Err(CommError::Length { rank, call: self.call, segment, expected, got }.into())
    }
}

/// Fills `outputs[i]` with the concatenation of all `inputs[..][i]`.
fn concatenate<M: Memory>(
    memory: &M,
    inputs: &[Vec<M::Buffer>],
    outputs: &mut [M::Buffer],
) -> Result<(), Error> {
    for (segment, output) in outputs.iter_mut().enumerate() {
        let mut offset = 0;
        for part in inputs.iter().map(|input| &input[segment]) {
            let dst = SliceMut::new(output, offset, part.len());
            memory.copy(Queue::Gather, Slice::whole(part), dst)?;
            offset += part.len();
        }
    }
    Ok(())
}

/// Transfers the contents of `from` to `to`: shares the storage if `share` is set and the memory supports it, copies
/// otherwise.
fn copy_or_share<M: Memory>(
    memory: &M,
    queue: Queue,
    from: &[M::Buffer],
    to: &mut [M::Buffer],
    share: bool,
) -> Result<(), Error> {
    for (src, dst) in from.iter().zip(to) {
        if !(share && memory.alias(dst, src)) {
            memory.copy(queue, Slice::whole(src), SliceMut::whole(dst))?;
        }
    }
    Ok(())
}

/// Fills `outputs[i]` with part `index` of `sums[i]`.
fn scatter<M: Memory>(
    memory: &M,
    sums: &[M::Buffer],
    index: usize,
    outputs: &mut [M::Buffer],
) -> Result<(), Error> {
    sums.iter().zip(outputs).try_for_each(|(sum, output)| {
        let src = Slice::new(sum, index * output.len(), output.len());
        memory.copy(Queue::Reduce, src, SliceMut::whole(output))
    })
}
