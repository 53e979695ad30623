//! Text generation: a [`Session`] extends a text token by token and returns the logits of the next token.
//!
//! A session walks the same graphs as training, over the new rows only. Some operations need more than these rows.
//! Rotation and learned positions read positions, as for packed samples. Attention reads the keys and values of all
//! rows so far, linear attention its states and its convolution the rows before; the walk caches these for each call. The
//! session knows no other operation and nothing about model families. If a longer text rotates differently (dynamic, longrope), cached keys are invalid, and the whole
//! text is run again.

use std::sync::Arc;

use fsdp_core::comm::Comms;
use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::Params;
use fsdp_core::{DType, Error, Queue};

use super::architecture::Architecture;
use super::kinds::{Kinds, Shape};
use super::unsharded::Whole;
use crate::backend::HeadChunks;
use crate::cuts::Cuts;
use crate::error::ModelError;
use crate::graph::{Decl, DeviceRunner, Inputs, MicroBatch, Operand, Request, Route, Runner, Step, walk};
use crate::host::{HostBuffer, HostMemory};
use crate::layer::Rope;
use crate::op::{Attention, AttentionDims, Delta, LossTerms, Op, Scores};

/// A text under construction, in host memory.
pub struct Session<A> {
    memory: Arc<HostMemory>,
    architecture: A,
    spec: ModelSpec,
    params: Params<HostBuffer>,
    dtype: DType,
    capacity: usize,
    tokens: Vec<u32>,
    /// What calls that need earlier tokens have left, in walk order: of attention, keys and values of all tokens.
    cache: Vec<HostBuffer>,
    /// The rotations of the cached keys.
    ropes: Vec<Rope>,
}

impl<A: Architecture> Session<A> {
    /// Creates an empty text of at most `capacity` tokens, whose keys and values are cached in the dtype of the
    /// weights.
    ///
    /// # Errors
    /// [`ModelError::Positions`] inside [`Error::Program`] if the model has fewer positions.
    pub fn new(
        memory: Arc<HostMemory>,
        architecture: A,
        weights: &Whole<HostBuffer>,
        capacity: usize,
    ) -> Result<Self, Error> {
        if let Some(positions) = architecture.positions_max().filter(|&positions| capacity > positions) {
            return Err(failed(ModelError::Positions { seq: capacity, positions }));
        }
        let (spec, params) = (architecture.description().spec.clone(), weights.params());
        let (dtype, tokens, cache, ropes) = (weights.dtype(), Vec::new(), Vec::new(), Vec::new());
        Ok(Self { memory, architecture, spec, params, dtype, capacity, tokens, cache, ropes })
    }

    /// Appends one or more tokens to the text; returns the logits of the token after the last.
    ///
    /// # Errors
    /// [`ModelError::Token`] inside [`Error::Program`], or those of the memory.
    ///
    /// # Panics
    /// If `tokens` is empty, or the text would exceed the capacity.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<Vec<f64>, Error> {
        let (before, length) = (self.tokens.len(), self.tokens.len() + tokens.len());
        assert!(!tokens.is_empty() && length <= self.capacity, "{length} tokens of {}", self.capacity);
        let vocab = self.architecture.head().vocab;
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(failed(ModelError::Token { id, vocab }));
        }
        self.tokens.extend(tokens);
        let mut kinds = self.kinds(tokens.len(), length)?;
        let (ropes, mut first) = (kinds.ropes(), before);
        if before > 0 && ropes != self.ropes {
            first = 0;
            kinds = self.kinds(length, length)?;
        }
        self.ropes = ropes;
        let rows = self.rows(&mut kinds, first)?;
        self.logits(&rows, length)
    }

    /// Returns the kinds of all blocks, for the last `rows` rows of a text of `length`.
    fn kinds(&self, rows: usize, length: usize) -> Result<Kinds, Error> {
        let (head_chunks, terms) = (HeadChunks::Small, LossTerms::default());
        let (dtype, training, packed) = (self.dtype, false, true);
        let shape = Shape {
            samples: 1,
            seq: rows,
            length,
            dtype,
            head_chunks,
            terms,
            training,
            packed,
            cuts: Cuts::WHOLE,
        };
        Kinds::new(&self.architecture, &self.spec, shape)
    }

    /// Returns the input of the last block for the rows from `first` on.
    fn rows(&mut self, kinds: &mut Kinds, first: usize) -> Result<HostBuffer, Error> {
        let ids = self.tokens[first..].to_vec();
        let positions: Vec<u32> = (first..self.tokens.len()).map(|position| position as u32).collect();
        let mut calls = 0;
        let mut rows = None;
        for block in (0..self.spec.blocks.len() - 1).map(BlockId) {
            rows = self.walk((block, Route::Evaluate), kinds, rows, [&ids, &positions], &mut calls)?;
        }
        Ok(rows.expect("there is a block before the last one"))
    }

    /// Runs the last block on the last of these rows of a text of `length`.
    fn logits(&mut self, rows: &HostBuffer, length: usize) -> Result<Vec<f64>, Error> {
        let width = self.architecture.head().hidden;
        let mut last = self.memory.allocate(Category::Activation, self.dtype, width)?;
        let row = Slice::new(rows, rows.len() - width, width);
        self.memory.copy(Queue::Compute, row, SliceMut::whole(&mut last))?;
        let (block, mut kinds) = (BlockId(self.spec.blocks.len() - 1), self.kinds(1, length)?);
        let (id, position) = (self.tokens[length - 1], (length - 1) as u32);
        let logits =
            self.walk((block, Route::Logits), &mut kinds, Some(last), [&[id], &[position]], &mut 0)?;
        let mut values = vec![0.0; self.architecture.head().vocab];
        let logits = logits.expect("a plan of logits leaves them");
        self.memory.read(Queue::Compute, Slice::whole(&logits), HostSliceMut::F64(&mut values))?;
        Ok(values)
    }

    /// Runs a block on its input; `calls` counts the calls that need earlier tokens.
    fn walk(
        &mut self,
        (block, route): (BlockId, Route),
        kinds: &mut Kinds,
        input: Option<HostBuffer>,
        [ids, positions]: [&[u32]; 2],
        calls: &mut usize,
    ) -> Result<Option<HostBuffer>, Error> {
        let memory = &*self.memory;
        let upload = |values: &[u32]| {
            let mut buffer = memory.allocate(Category::Activation, DType::U32, values.len())?;
            memory.write(Queue::Compute, HostSlice::U32(values), SliceMut::whole(&mut buffer))?;
            Ok::<_, Error>(buffer)
        };
        let (first, count, document) = (positions[0] as usize, ids.len(), 0..ids.len());
        let (ids, positions) = (upload(ids)?, upload(positions)?);
        let mut losses = memory.allocate(Category::Activation, DType::F64, count)?;
        self.params.enter(block);
        let plan = kinds.plan(block, Request { route, input_shared: false, output_read: true });
        let mut places = vec![None; plan.places.len()];
        if let Some(place) = plan.input {
            places[place] = input;
        }
        let batch = MicroBatch {
            chunks: 1,
            first_chunk: None,
            ids: Slice::whole(&ids),
            targets: Slice::whole(&ids),
            positions: Some(Slice::whole(&positions)),
            documents: std::slice::from_ref(&document),
            counted: 0,
            counted_rows: 0,
            lengths: &[],
            keys_ends: &[],
            samples: &[0],
            seed: 0,
            step: 0,
        };
        let inputs = Inputs { memory, spec: &self.spec, block, params: &self.params, batch };
        let losses = SliceMut::whole(&mut losses);
        let (gradients, comms) = (&mut [][..], &mut Comms::alone());
        let device = DeviceRunner {
            inputs,
            gradients,
            comms,
            losses,
            z_losses: None,
            routers: None,
            in_flight: Vec::new(),
        };
        let mut runner =
            CachingRunner { device, memory, cache: &mut self.cache, calls, first, capacity: self.capacity };
        walk(&plan.forward, &plan.places, &mut places, &mut runner)?;
        Ok(plan.output.and_then(|place| places[place].take()))
    }
}

/// A [`Runner`] that executes calls and caches what later tokens need of them.
struct CachingRunner<'a> {
    device: DeviceRunner<'a, HostMemory>,
    memory: &'a HostMemory,
    cache: &'a mut Vec<HostBuffer>,
    calls: &'a mut usize,
    /// The position of the first row.
    first: usize,
    capacity: usize,
}

impl Runner for CachingRunner<'_> {
    type Handle = HostBuffer;

    fn allocate(&mut self, decl: &Decl) -> Result<HostBuffer, Error> {
        self.device.allocate(decl)
    }

    fn run(&mut self, step: &Step, places: &mut [Option<HostBuffer>]) -> Result<(), Error> {
        match step.call.op {
            Op::Attention(Attention::Forward { dims, scores }) => self.attend(step, (dims, scores), places),
            Op::Delta(op @ (Delta::Convolve(_) | Delta::Scan(_))) => self.continue_state(step, op, places),
            _ => self.device.run(step, places),
        }
    }
}

impl CachingRunner<'_> {
    /// The number of the next cached call, whose cache has `len` elements.
    fn next(&mut self, dtype: DType, len: usize) -> Result<usize, Error> {
        if *self.calls == self.cache.len() {
            self.cache.push(self.memory.allocate(Category::Activation, dtype, len)?);
        }
        *self.calls += 1;
        Ok(*self.calls - 1)
    }

    fn attend(
        &mut self,
        step: &Step,
        (dims, scores): (AttentionDims, Scores),
        places: &mut [Option<HostBuffer>],
    ) -> Result<(), Error> {
        let call = &step.call;
        let Operand::Local { id, offset, len } = call.reads[0] else {
            unreachable!("attention reads a value")
        };
        let qkv = places[id].clone().expect("a call reads places that live");
        let (memory, width) = (self.memory, 2 * dims.kv_heads * dims.head_dim);
        let index = self.next(qkv.dtype(), self.capacity * width)?;
        let cache = &mut self.cache[index];
        for row in 0..dims.seq {
            let from = offset + row * dims.packed() + dims.heads * dims.head_dim;
            let to = SliceMut::new(cache, (self.first + row) * width, width);
            memory.copy(Queue::Compute, Slice::new(&qkv, from, width), to)?;
        }
        // At position 0, all visible keys are among the given rows.
        if self.first == 0 {
            return self.device.run(step, places);
        }
        let [y, lse] = [0, 1].map(|write| call.writes[write].0.local().expect("attention writes values"));
        let [mut output, mut log_sums] =
            [y, lse].map(|place| places[place].take().expect("a call writes to places that live"));
        let cached = Slice::new(cache, 0, (self.first + dims.seq) * width);
        let reads = [Slice::new(&qkv, offset, len), cached];
        let writes = [&mut output, &mut log_sums].map(SliceMut::whole);
        memory.attend_cached((&dims, &scores), self.first, reads, writes)?;
        (places[y], places[lse]) = (Some(output), Some(log_sums));
        Ok(())
    }

    /// Runs a call of linear attention from what the tokens before have left; nothing before the first.
    fn continue_state(
        &mut self,
        Step { call, chunk, .. }: &Step,
        op: Delta,
        places: &mut [Option<HostBuffer>],
    ) -> Result<(), Error> {
        let memory = self.memory;
        let y = call.writes[0].0.local().expect("forward writes values");
        let mut output = places[y].take().expect("a call writes to places that live");
        let (dtype, len) = match op {
            Delta::Scan(dims) => (output.dtype().master(), dims.value_heads * dims.key_dim * dims.value_dim),
            Delta::Convolve(dims) => (output.dtype(), (dims.kernel - 1) * dims.width),
            _ => unreachable!("a text is not trained on"),
        };
        let index = self.next(dtype, len)?;
        let cache = &mut self.cache[index];
        if self.first == 0 {
            memory.zero(Queue::Compute, SliceMut::whole(cache))?;
        }
        let reads: Vec<_> = call
            .reads
            .iter()
            .map(|read| self.device.inputs.read(*read, *chunk, places))
            .collect::<Result<_, _>>()?;
        let writes = [cache, &mut output].map(SliceMut::whole);
        match (op, &reads[..]) {
            (Delta::Scan(dims), &[qkv, gates, a_log, dt_bias]) => {
                memory.scan_cached(dims, [qkv, gates, a_log, dt_bias], writes)?;
            }
            (Delta::Convolve(dims), &[x, weight]) => memory.convolve_cached(dims, [x, weight], writes)?,
            _ => unreachable!("operands were described"),
        }
        places[y] = Some(output);
        Ok(())
    }
}

fn failed(source: ModelError) -> Error {
    Error::Program { block: "text".to_owned(), source: Box::new(source) }
}
