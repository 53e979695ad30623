//! Runs a program without sharding: all parameters in one buffer, and quantized ones in another.
//!
//! Used by memory predictions, tests of models and the unsharded oracle. Independent of units, schedules and other
//! ranks.

use fsdp_core::comm::Comms;
use fsdp_core::layout::SegmentId;
use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, View};
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::program::{BlockCall, Gradients, Params, Pass, Program, calls};
use fsdp_core::schedule::Round;
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Error, Queue};

const ALLOCATED: &str = "quantized parameters have a buffer";

/// All parameters of a model (or other values of the same shapes).
#[derive(Debug)]
pub struct Whole<B> {
    buffer: B,
    /// The quantized parameters, if there are any.
    quantized: Option<B>,
    /// The place of each parameter.
    ranges: Vec<Range>,
}

/// Where a parameter is: first element and length, in the buffer of its kind.
#[derive(Clone, Copy, Debug)]
struct Range {
    offset: usize,
    len: usize,
    is_quantized: bool,
}

impl<B: Buffer> Whole<B> {
    /// Allocates space for the values of all parameters; their contents are unspecified.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn new<M: Memory<Buffer = B>>(
        memory: &M,
        spec: &ModelSpec,
        category: Category,
        dtype: DType,
    ) -> Result<Self, Error> {
        let (ranges, [len, bytes]) = ranges(spec);
        let buffer = memory.allocate(category, dtype, len)?;
        let quantized = (bytes > 0).then(|| memory.allocate(category, DType::U8, bytes)).transpose()?;
        Ok(Self { buffer, quantized, ranges })
    }

    fn buffer(&self, range: Range) -> &B {
        if range.is_quantized { self.quantized.as_ref().expect(ALLOCATED) } else { &self.buffer }
    }

    fn slice_mut(&mut self, range: Range, first: usize, len: usize) -> SliceMut<'_, B> {
        let buffer =
            if range.is_quantized { self.quantized.as_mut().expect(ALLOCATED) } else { &mut self.buffer };
        SliceMut::new(buffer, range.offset + first, len)
    }

    /// Sets all values to zero.
    ///
    /// # Errors
    /// As [`Whole::write`].
    pub fn zero<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        let buffers = std::iter::once(&mut self.buffer).chain(&mut self.quantized);
        buffers.into_iter().try_for_each(|buffer| memory.zero(Queue::Compute, SliceMut::whole(buffer)))
    }

    /// Writes the values of one parameter.
    ///
    /// # Errors
    /// [`Error::Shared`] while views of [`Whole::params`] exist, or those of the memory.
    pub fn write<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        id: ParamId,
        values: HostSlice<'_>,
    ) -> Result<(), Error> {
        let range = self.ranges[id.0];
        memory.write(Queue::Compute, values, self.slice_mut(range, 0, range.len))
    }

    /// Writes some values of one parameter, starting at element `first`.
    ///
    /// # Errors
    /// As [`Whole::write`].
    pub fn write_part<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        id: ParamId,
        first: usize,
        values: &[f64],
    ) -> Result<(), Error> {
        let range = self.ranges[id.0];
        assert!(first + values.len() <= range.len, "the values are those of one parameter");
        let into = self.slice_mut(range, first, values.len());
        memory.write_numbers(Queue::Compute, values, into)
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.buffer.dtype()
    }

    /// Reads the values of one parameter.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn read<M: Memory<Buffer = B>>(
        &self,
        memory: &M,
        id: ParamId,
        values: HostSliceMut<'_>,
    ) -> Result<(), Error> {
        let range = self.ranges[id.0];
        memory.read(Queue::Compute, Slice::new(self.buffer(range), range.offset, range.len), values)
    }

    /// Returns views of all parameters.
    pub fn params(&self) -> Params<B> {
        let mut params = Params::default();
        for (index, &range) in self.ranges.iter().enumerate() {
            let Range { offset, len, .. } = range;
            params.insert(ParamId(index), View { buffer: self.buffer(range).clone(), offset, len });
        }
        params
    }

    /// Converts the buffer to gradients of the trained parameters, to be written by the next micro-batch.
    pub fn into_gradients(self, spec: &ModelSpec) -> Gradients<B> {
        let trained = self.ranges.iter().enumerate().filter(|(index, _)| spec.params[*index].trainable);
        let places: Vec<_> =
            trained.map(|(index, range)| (ParamId(index), SegmentId(0), range.offset, range.len)).collect();
        let mut gradients = Gradients::default();
        gradients.open(UnitId(0), vec![self.buffer], places);
        gradients
    }

    /// Closes gradients opened by [`Whole::into_gradients`]; elements that no block wrote are zero.
    ///
    /// # Errors
    /// Those of the memory.
    ///
    /// # Panics
    /// If they were opened elsewhere.
    pub fn from_gradients<M: Memory<Buffer = B>>(
        memory: &M,
        spec: &ModelSpec,
        mut gradients: Gradients<B>,
    ) -> Result<Self, Error> {
        let buffer = gradients.close(memory, UnitId(0))?.and_then(|mut buffers| buffers.pop());
        let (buffer, (ranges, _)) = (buffer.expect("unsharded gradients are one buffer"), ranges(spec));
        Ok(Self { buffer, quantized: None, ranges })
    }
}

/// The place of each parameter, and the lengths of the buffers of those that are not quantized and those that are.
fn ranges(spec: &ModelSpec) -> (Vec<Range>, [usize; 2]) {
    let mut lens = [0; 2];
    let range = |param: &fsdp_core::model::ParamSpec| {
        let (is_quantized, len) = (param.quantized.is_some(), param.stored_len());
        let end = &mut lens[usize::from(is_quantized)];
        *end += len;
        Range { offset: *end - len, len, is_quantized }
    };
    (spec.params.iter().map(range).collect(), lens)
}

/// Runs one micro-batch.
///
/// # Errors
/// Those of the program.
pub fn run<M: Memory>(
    program: &mut impl Program<M>,
    memory: &M,
    round: usize,
    pass: Pass,
    params: &mut Params<M::Buffer>,
    gradients: &mut Gradients<M::Buffer>,
) -> Result<(), Error> {
    program.begin(memory, Round(round), pass)?;
    for call in calls(program.spec(), pass) {
        make(program, memory, call, params, gradients)?;
    }
    Ok(())
}

/// Makes one call of a micro-batch.
///
/// # Errors
/// Those of the program.
pub fn make<M: Memory>(
    program: &mut impl Program<M>,
    memory: &M,
    call: BlockCall,
    params: &mut Params<M::Buffer>,
    gradients: &mut Gradients<M::Buffer>,
) -> Result<(), Error> {
    params.enter(call.block());
    program.call(memory, call, params, std::slice::from_mut(gradients), &mut Comms::alone())
}
