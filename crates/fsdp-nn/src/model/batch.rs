//! The data of a step, on the host and on the device.

use std::ops::Range;

use fsdp_core::DType;
use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::comm::Comms;
use fsdp_core::memory::{Arithmetic, Buffer, Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::scalars::LOSS;

use super::architecture::Architecture;
use super::counted::Counted;
use super::routers::RouterBuffers;
use crate::backend::{Backend, IGNORED_TARGET};
use crate::cuts::Chunks;
use crate::error::ModelError;
use crate::graph::{MicroBatch, Routers};
use crate::lengths::expect;
use crate::op::RouterTerms;

/// One micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, ordered by (sample, position).
    pub ids: Vec<u32>,
    /// The token to predict at each position; [`IGNORED_TARGET`] does not count.
    pub targets: Vec<u32>,
    /// Global ids of the samples, which key dropout masks.
    pub samples: Vec<u64>,
    /// Tokens per sample.
    pub seq: usize,
    /// The position of each token within its document, if samples pack several documents that do not attend to each
    /// other: a document begins where the position is 0.
    pub positions: Option<Vec<u32>>,
}

/// Facts about the rows of a micro-batch that otherwise follow from its positions and targets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowFacts {
    /// The rows of each document, in order, of a micro-batch with positions.
    pub documents: Option<Vec<Range<usize>>>,
    /// Per sample, the number of rows that are not padding.
    pub lengths: Option<Vec<usize>>,
    /// Per sample, where the keys end that any of its queries sees: padding after them attends to the text only. Empty if a
    /// query sees all keys up to its own.
    pub keys_ends: Vec<usize>,
}

impl Batch {
    /// Returns the number of counted targets.
    pub fn counted(&self) -> u64 {
        self.targets.iter().filter(|&&target| target != IGNORED_TARGET).count() as u64
    }

    /// Returns, per sample, the number of rows up to its last counted target.
    fn lengths(&self) -> Vec<usize> {
        let length = |targets: &[u32]| targets.iter().rposition(|&target| target != IGNORED_TARGET);
        self.targets.chunks(self.seq).map(|targets| length(targets).map_or(0, |last| last + 1)).collect()
    }

    /// Returns the rows of each document, in order; empty if samples are not packed.
    ///
    /// # Errors
    /// [`ModelError::Position`] if a position neither continues a document nor begins one.
    fn documents(&self) -> Result<Vec<Range<usize>>, ModelError> {
        let mut documents: Vec<Range<usize>> = Vec::new();
        for (row, &position) in self.positions.iter().flatten().enumerate() {
            match documents.last_mut() {
                _ if position == 0 => documents.push(row..row + 1),
                Some(last) if row % self.seq > 0 && last.len() == position as usize => last.end += 1,
                _ => return Err(ModelError::Position { row, position }),
            }
        }
        Ok(documents)
    }

    /// Cuts samples, and keeps the chunks of this rank: rows are then ordered by (chunk, sample, position).
    fn in_chunks(self, chunks: Chunks) -> Self {
        if chunks.count == 1 {
            return self;
        }
        let (whole, seq) = (self.seq, self.seq / chunks.count);
        let cut = |rows: &[u32]| -> Vec<u32> {
            let here = chunks.first..chunks.first + chunks.here;
            here.flat_map(|chunk| {
                rows.chunks(whole).flat_map(move |sample| sample[chunk * seq..][..seq].iter().copied())
            })
            .collect()
        };
        let indices = || (0..self.ids.len()).map(|row| (row % whole) as u32).collect();
        let positions = self.positions.unwrap_or_else(indices);
        Self {
            ids: cut(&self.ids),
            targets: cut(&self.targets),
            samples: self.samples,
            seq,
            positions: Some(cut(&positions)),
        }
    }

    fn check<A: Architecture>(&self, architecture: &A, chunks: Chunks) -> Result<(), ModelError> {
        let rows = self.samples.len() * self.seq;
        let positions = self.positions.as_ref().map_or(self.ids.len(), Vec::len);
        if rows == 0 || [self.ids.len(), self.targets.len(), positions] != [rows; 3] {
            return Err(ModelError::BatchShape {
                samples: self.samples.len(),
                seq: self.seq,
                ids: self.ids.len(),
                targets: self.targets.len(),
                positions,
            });
        }
        if !self.seq.is_multiple_of(chunks.count) {
            return Err(ModelError::Chunks { chunks: chunks.count, seq: self.seq });
        }
        let vocab = architecture.head().vocab;
        let targets = self.targets.iter().filter(|&&target| target != IGNORED_TARGET);
        if let Some(&id) = self.ids.iter().chain(targets).find(|&&id| id as usize >= vocab) {
            return Err(ModelError::Token { id, vocab });
        }
        match architecture.positions_max() {
            Some(positions) if self.seq > positions => {
                Err(ModelError::Positions { seq: self.seq, positions })
            }
            _ => Ok(()),
        }
    }
}

/// Bytes per token: its id, target and loss, plus its z-loss and its position in packed samples, if any.
pub(crate) fn token_bytes(packed: bool, z_loss: bool) -> usize {
    4 + 4 + 8 + if packed { 4 } else { 0 } + if z_loss { 8 } else { 0 }
}

/// This rank's part of the micro-batches of its step. Their tokens, targets, losses and (if packed) positions are stored back to
/// back, in one buffer each, kept from step to step and never shrunk: see [`token_bytes`].
pub(super) struct StepData<B> {
    step: u64,
    batches: Vec<Batch>,
    /// Per micro-batch, the rows of its documents, if samples are packed.
    documents: Vec<Vec<Range<usize>>>,
    /// Facts about rows that do not follow from the micro-batch.
    pub(super) row_facts: RowFacts,
    keys_ends: Vec<usize>,
    /// Per micro-batch, by chunk and sample, the number of rows up to the last counted target of the sample.
    lengths: Vec<Vec<usize>>,
    /// Per micro-batch, the number of counted targets in all chunks, and of rows up to the last ones of samples.
    counted: Vec<(u64, usize)>,
    /// The first chunk on this rank, where samples are cut.
    first_chunk: Option<usize>,
    /// The first row of each micro-batch.
    offsets: Vec<usize>,
    device: Option<Device<B>>,
    /// Micro-batches whose losses were computed and not yet read, each with whether it was for training, which adds
    /// loss terms.
    unread_losses: Vec<(usize, bool)>,
}

struct Device<B> {
    ids: B,
    targets: B,
    losses: B,
    z_losses: Option<B>,
    positions: Option<B>,
    routers: Option<RouterBuffers<B>>,
}

impl<B> Default for StepData<B> {
    fn default() -> Self {
        Self {
            step: 0,
            batches: Vec::new(),
            documents: Vec::new(),
            row_facts: RowFacts::default(),
            keys_ends: Vec::new(),
            lengths: Vec::new(),
            counted: Vec::new(),
            first_chunk: None,
            offsets: Vec::new(),
            device: None,
            unread_losses: Vec::new(),
        }
    }
}

impl<B: Buffer> StepData<B> {
    /// Sets the micro-batches of a step.
    pub(super) fn set<M: Backend<Buffer = B>, A: Architecture>(
        &mut self,
        memory: &M,
        (architecture, routers, z_loss): (&A, Option<RouterTerms>, bool),
        chunks: Chunks,
        step: u64,
        batches: Vec<Batch>,
    ) -> Result<(), Error> {
        self.documents.clear();
        for (round, batch) in batches.iter().enumerate() {
            let documents = batch.check(architecture, chunks).and_then(|()| batch.documents());
            self.documents.push(documents.map_err(|source| program_error(round, source))?);
        }
        let RowFacts { documents, lengths, keys_ends } = std::mem::take(&mut self.row_facts);
        self.keys_ends = keys_ends;
        documents.into_iter().for_each(|documents| self.documents = vec![documents]);
        let lengths = match lengths {
            Some(lengths) => vec![lengths],
            None => batches.iter().map(Batch::lengths).collect(),
        };
        let counted = batches.iter().map(Batch::counted);
        self.counted = counted.zip(lengths.iter().map(|lengths| lengths.iter().sum())).collect();
        self.batches = batches.into_iter().map(|batch| batch.in_chunks(chunks)).collect();
        self.first_chunk = (chunks.count > 1).then_some(chunks.first);
        let positions = self.batches.iter().any(|batch| batch.positions.is_some());
        let mut rows = 0;
        self.offsets.clear();
        for batch in &self.batches {
            self.offsets.push(rows);
            rows += batch.ids.len();
        }
        self.step = step;
        self.unread_losses.clear();
        let of_chunks = |(lengths, batch): (Vec<usize>, &Batch)| chunks.lengths(&lengths, batch.seq);
        self.lengths = lengths.into_iter().zip(&self.batches).map(of_chunks).collect();
        self.reserve(memory, (rows, positions, z_loss), routers.map(|terms| (terms, chunks)))?;
        self.upload(memory)
    }

    fn reserve<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        (rows, with_positions, z_loss): (usize, bool, bool),
        routers: Option<(RouterTerms, Chunks)>,
    ) -> Result<(), Error> {
        let count = self.batches.len();
        let has_routers =
            |device: &Device<B>| device.routers.as_ref().is_none_or(|routers| routers.has_room(count));
        let fits = |device: &Device<B>| {
            device.ids.len() >= rows && (device.positions.is_some() || !with_positions) && has_routers(device)
        };
        if self.device.as_ref().is_some_and(fits) {
            return Ok(());
        }
        self.device = None;
        // Zeroed now, so that their storage is allocated from the first step on.
        let numbers = |len| {
            let mut numbers = memory.allocate(Category::Activation, DType::F64, len)?;
            memory.zero(Queue::Compute, SliceMut::whole(&mut numbers))?;
            Ok::<_, Error>(numbers)
        };
        let losses = numbers(rows)?;
        let z_losses = z_loss.then(|| numbers(rows)).transpose()?;
        let routers = routers.map(|routers| RouterBuffers::new(memory, routers, count)).transpose()?;
        let mut ids = || memory.allocate(Category::Activation, DType::U32, rows);
        let positions = with_positions.then(&mut ids).transpose()?;
        self.device = Some(Device { ids: ids()?, targets: ids()?, losses, z_losses, positions, routers });
        Ok(())
    }

    fn upload<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        let Some(device) = &mut self.device else { return Ok(()) };
        for (batch, &offset) in self.batches.iter().zip(&self.offsets) {
            let len = batch.ids.len();
            let ids = SliceMut::new(&mut device.ids, offset, len);
            memory.write(Queue::Compute, HostSlice::U32(&batch.ids), ids)?;
            let targets = SliceMut::new(&mut device.targets, offset, len);
            memory.write(Queue::Compute, HostSlice::U32(&batch.targets), targets)?;
            if let (Some(to), Some(positions)) = (&mut device.positions, &batch.positions) {
                memory.write(Queue::Compute, HostSlice::U32(positions), SliceMut::new(to, offset, len))?;
            }
        }
        Ok(())
    }

    /// Checks that the step has a micro-batch `round`.
    pub(super) fn check_round(&self, round: usize) -> Result<(), Error> {
        let rounds = self.batches.len();
        if round < rounds {
            return Ok(());
        }
        Err(program_error(round, ModelError::NoMicroBatch { round, rounds }))
    }

    /// Samples of a micro-batch, tokens per sample or of a chunk of it, and whether its samples are packed.
    pub(super) fn sizes(&self, round: usize) -> (usize, usize, bool) {
        let batch = &self.batches[round];
        (batch.samples.len(), batch.seq, !self.documents[round].is_empty())
    }

    /// Returns a micro-batch, and the destinations of losses and router data; `load_range` is the range of
    /// the block's load.
    pub(super) fn parts(&mut self, (round, seed): (usize, u64), load_range: Range<usize>) -> Parts<'_, B> {
        let batch = &self.batches[round];
        let device = self.device.as_mut().expect("data with micro-batches is on the device");
        let (offset, len) = (self.offsets[round], batch.ids.len());
        let positions = device.positions.as_ref().filter(|_| batch.positions.is_some());
        Parts {
            batch: MicroBatch {
                chunks: batch.ids.len() / (batch.samples.len() * batch.seq),
                first_chunk: self.first_chunk,
                ids: Slice::new(&device.ids, offset, len),
                targets: Slice::new(&device.targets, offset, len),
                positions: positions.map(|positions| Slice::new(positions, offset, len)),
                documents: &self.documents[round],
                counted: self.counted[round].0,
                counted_rows: self.counted[round].1,
                lengths: &self.lengths[round],
                keys_ends: &self.keys_ends,
                samples: &batch.samples,
                seed,
                step: self.step,
            },
            losses: SliceMut::new(&mut device.losses, offset, len),
            z_losses: device.z_losses.as_mut().map(|losses| SliceMut::new(losses, offset, len)),
            routers: device.routers.as_mut().map(|routers| routers.part(round, load_range)),
        }
    }

    /// Adds the loads of all chunks of a micro-batch, where its balancing loss needs them.
    pub(super) fn sum_loads<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        comms: &mut Comms<M>,
        round: usize,
    ) -> Result<(), Error> {
        let routers = self.device.as_mut().and_then(|device| device.routers.as_mut());
        routers.map_or(Ok(()), |routers| routers.sum(memory, comms, round))
    }

    /// Records that the losses of a micro-batch were computed.
    pub(super) fn note_losses(&mut self, round: usize, training: bool) {
        self.unread_losses.push((round, training));
    }

    /// Adds the losses computed since the last call to the scalars of a step, and for training also the sums and
    /// counts of `counted`; returns the number of counted targets.
    pub(super) fn take_loss<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        queue: Queue,
        counted: Counted,
        words: SliceMut<'_, B>,
    ) -> Result<u64, Error> {
        let (tallies, mut count) = (counted.all(), 0);
        expect("words of a step's scalars", words.len, tallies.scalar_words());
        let SliceMut { buffer: words, offset: first, .. } = words;
        let Some(device) = &self.device else { return Ok(count) };
        let mut compute = |operation, range: Range<usize>| {
            memory.compute(queue, operation, SliceMut::new(words, first + range.start, range.len()))
        };
        for (round, training) in self.unread_losses.drain(..) {
            let batch = &self.batches[round];
            let (offset, len) = (self.offsets[round], batch.ids.len());
            compute(Arithmetic::ExactSum(Slice::new(&device.losses, offset, len)), LOSS)?;
            count += batch.counted();
            if !training {
                continue;
            }
            if let Some((index, losses)) = counted.z_loss().zip(device.z_losses.as_ref()) {
                let losses = Arithmetic::ExactSum(Slice::new(losses, offset, len));
                compute(losses, tallies.sum(index))?;
            }
            let Some(routers) = &device.routers else { continue };
            if let Some(loss) = routers.loss(round) {
                let index = counted.router_loss().expect("mixtures have a sum of their losses");
                compute(Arithmetic::ExactSum(loss), LOSS)?;
                compute(Arithmetic::ExactSum(loss), tallies.sum(index))?;
            }
            let terms = routers.terms();
            let sums = [
                (terms.z_loss_at(), counted.router_z_loss()),
                (terms.sequence_at(), counted.router_sequence_loss()),
            ];
            for (at, index) in sums.into_iter().filter_map(|(at, index)| at.zip(index)) {
                for loss in routers.own_losses(round, at) {
                    compute(Arithmetic::ExactSum(loss), LOSS)?;
                    compute(Arithmetic::ExactSum(loss), tallies.sum(index))?;
                }
            }
            for (layer, routes) in routers.routes(round) {
                let start = tallies.counts().start + layer * routes.len;
                compute(Arithmetic::AddCounts(routes), start..start + routes.len)?;
            }
        }
        Ok(count)
    }
}

/// The parts of a micro-batch that a block needs.
pub(super) struct Parts<'a, B> {
    pub(super) batch: MicroBatch<'a, B>,
    pub(super) losses: SliceMut<'a, B>,
    pub(super) z_losses: Option<SliceMut<'a, B>>,
    pub(super) routers: Option<Routers<'a, B>>,
}

fn program_error(round: usize, source: ModelError) -> Error {
    Error::Program { block: format!("micro-batch {round}"), source: Box::new(source) }
}
