//! What the routers of a rank's micro-batches leave for their terms of the loss: loads of each chunk, and their sums over all
//! chunks of the samples.

use std::ops::Range;

use fsdp_core::comm::{Comms, Purpose};
use fsdp_core::memory::{Arithmetic, Buffer, Category, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Group, Queue};

use crate::cuts::Chunks;
use crate::graph::Routers;
use crate::op::RouterTerms;

/// The router data of all micro-batches, kept from step to step.
pub(super) struct RouterBuffers<B> {
    terms: RouterTerms,
    chunks: Chunks,
    /// By micro-batch, chunk and mixture.
    loads: B,
    /// One per micro-batch.
    losses: B,
    /// Per micro-batch, what adds the loads of its chunks; empty if samples are whole, or no loss needs the sums.
    sums: Vec<LoadSums<B>>,
}

/// Adds the loads of all chunks of a micro-batch.
struct LoadSums<B> {
    /// What this rank sends, if other ranks have chunks.
    own: Option<B>,
    /// Loads by chunk. Ranks may share the storage of what they gather, so nothing is added here, and it is released.
    gathered: B,
    /// Sums of neighbors; the two take turns, and the first has the total afterwards.
    sums: [B; 2],
}

/// Lengths of what is allocated per micro-batch: loads, loss, loads to send, and loads of all chunks with both sums.
fn lens(terms: RouterTerms, chunks: Chunks) -> [usize; 4] {
    let adds = usize::from(chunks.count > 1 && terms.balancing().is_some());
    let sends = adds * usize::from(chunks.here < chunks.count);
    let [here, all] = [chunks.here, chunks.count].map(|chunks| chunks * terms.loads_len());
    [here, 1, sends * here, adds * 2 * all]
}

/// Bytes per micro-batch.
pub(crate) fn router_bytes(terms: RouterTerms, chunks: Chunks) -> usize {
    lens(terms, chunks).iter().sum::<usize>() * DType::F64.size_bytes()
}

impl<B: Buffer> RouterBuffers<B> {
    pub(super) fn new<M: Memory<Buffer = B>>(
        memory: &M,
        (terms, chunks): (RouterTerms, Chunks),
        rounds: usize,
    ) -> Result<Self, Error> {
        // Zeroed now, so that their storage is allocated from the first step on.
        let numbers = |len| {
            let mut numbers = memory.allocate(Category::Activation, DType::F64, len)?;
            memory.zero(Queue::Compute, SliceMut::whole(&mut numbers))?;
            Ok::<_, Error>(numbers)
        };
        let [loads, losses, own, all] = lens(terms, chunks);
        let sum = |_| {
            let own = if own > 0 { Some(numbers(own)?) } else { None };
            let sums = [numbers(all / 4)?, numbers(all / 4)?];
            Ok::<_, Error>(LoadSums { own, gathered: numbers(all / 2)?, sums })
        };
        let sums = (0..if all > 0 { rounds } else { 0 }).map(sum).collect::<Result<_, _>>()?;
        let (loads, losses) = (numbers(rounds * loads)?, numbers(rounds * losses)?);
        Ok(Self { terms, chunks, loads, losses, sums })
    }

    /// Whether there is room for so many micro-batches.
    pub(super) fn has_room(&self, rounds: usize) -> bool {
        self.losses.len() >= rounds
    }

    /// The destinations of a block of a micro-batch, whose load is at this range of its loads.
    pub(super) fn part(&mut self, round: usize, load_range: Range<usize>) -> Routers<'_, B> {
        let len = self.chunks.here * self.terms.loads_len();
        Routers {
            loads: SliceMut::new(&mut self.loads, round * len, len),
            load_range,
            loss: SliceMut::new(&mut self.losses, round, 1),
            total: self.sums.get(round).map(|sums| Slice::new(&sums.sums[0], 0, self.terms.loads_len())),
        }
    }

    /// Adds the loads of all chunks of a micro-batch in the order of the tree, those of other ranks among them, once its
    /// routers have run.
    pub(super) fn sum<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        comms: &mut Comms<M>,
        round: usize,
    ) -> Result<(), Error> {
        let (len, here) = (self.terms.loads_len(), self.chunks.here * self.terms.loads_len());
        let Some(LoadSums { own, gathered, sums: [sums, spare] }) = self.sums.get_mut(round) else {
            return Ok(());
        };
        let loads = Slice::new(&self.loads, round * here, here);
        match own {
            None => memory.copy(Queue::Compute, loads, SliceMut::whole(gathered))?,
            Some(own) => {
                memory.copy(Queue::Compute, loads, SliceMut::whole(own))?;
                let comm = comms.find(Queue::Compute, Group::CONTEXT);
                let comm = comm.expect("ranks that share samples are connected");
                // Another handle stands in while the collective has the buffer.
                let output = std::mem::replace(gathered, spare.clone());
                let (inputs, outputs) = (vec![own.clone()], vec![output]);
                let pending = comm.all_gather(memory, Purpose::Activations, None, inputs, outputs)?;
                let mut outputs = pending.wait_on(memory, Queue::Compute)?.outputs;
                *gathered = outputs.pop().expect("an all-gather gives its outputs back");
            }
        }
        let mut count = self.chunks.count;
        while count > 1 {
            let from = if count == self.chunks.count { &*gathered } else { &*sums };
            count /= 2;
            for pair in 0..count {
                let [left, right] = [0, 1].map(|side| Slice::new(from, (2 * pair + side) * len, len));
                memory.copy(Queue::Compute, left, SliceMut::new(spare, pair * len, len))?;
                let sum = SliceMut::new(spare, pair * len, len);
                memory.compute(Queue::Compute, Arithmetic::Accumulate(right), sum)?;
            }
            std::mem::swap(sums, spare);
        }
        memory.release(Queue::Compute, gathered);
        Ok(())
    }

    /// The balancing loss of a micro-batch, if there is one, and this rank is the one of those that share it that reports
    /// it.
    pub(super) fn loss(&self, round: usize) -> Option<Slice<'_, B>> {
        let reports = self.terms.balancing().is_some() && self.chunks.first == 0;
        reports.then(|| Slice::new(&self.losses, round, 1))
    }

    /// What the routers add to the loss.
    pub(super) fn terms(&self) -> RouterTerms {
        self.terms
    }

    /// A loss that each mixture has for itself, at `at` in its load, in the chunks of this rank.
    pub(super) fn own_losses(&self, round: usize, at: usize) -> impl Iterator<Item = Slice<'_, B>> {
        self.loads(round).map(move |(_, load)| Slice::new(load.buffer, load.offset + at, 1))
    }

    /// The routes to each expert in the chunks of this rank, with the number of the mixture.
    pub(super) fn routes(&self, round: usize) -> impl Iterator<Item = (usize, Slice<'_, B>)> {
        let experts = self.terms.experts;
        self.loads(round).map(move |(layer, load)| (layer, Slice::new(load.buffer, load.offset, experts)))
    }

    /// The loads of a micro-batch in the chunks of this rank, with the number of the mixture.
    fn loads(&self, round: usize) -> impl Iterator<Item = (usize, Slice<'_, B>)> {
        let (layers, len) = (self.terms.layers, self.terms.load_len());
        let count = self.chunks.here * layers;
        (0..count)
            .map(move |load| (load % layers, Slice::new(&self.loads, (round * count + load) * len, len)))
    }
}
