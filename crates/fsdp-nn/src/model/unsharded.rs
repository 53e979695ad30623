//! Runs a program without sharding: all parameters in one buffer.
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

/// All parameters of a model (or other values of the same shapes) in one buffer.
#[derive(Debug)]
pub struct Whole<B> {
    buffer: B,
    /// First element and length of each parameter.
    ranges: Vec<(usize, usize)>,
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
        let ranges = ranges(spec);
        let len = ranges.last().map_or(0, |(offset, len)| offset + len);
        Ok(Self { buffer: memory.allocate(category, dtype, len)?, ranges })
    }

    /// Sets all values to zero.
    ///
    /// # Errors
    /// As [`Whole::write`].
    pub fn zero<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        memory.zero(Queue::Compute, SliceMut::whole(&mut self.buffer))
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
        let (offset, len) = self.ranges[id.0];
        memory.write(Queue::Compute, values, SliceMut::new(&mut self.buffer, offset, len))
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
        let (offset, len) = self.ranges[id.0];
        assert!(first + values.len() <= len, "the values are those of one parameter");
        memory.write(
            Queue::Compute,
            HostSlice::F64(values),
            SliceMut::new(&mut self.buffer, offset + first, values.len()),
        )
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
        let (offset, len) = self.ranges[id.0];
        memory.read(Queue::Compute, Slice::new(&self.buffer, offset, len), values)
    }

    /// Returns views of all parameters.
    pub fn params(&self) -> Params<B> {
        let mut params = Params::default();
        for (index, &(offset, len)) in self.ranges.iter().enumerate() {
            params.insert(ParamId(index), View { buffer: self.buffer.clone(), offset, len });
        }
        params
    }

    /// Converts the buffer to gradients of the trained parameters, to be written by the next micro-batch.
    pub fn into_gradients(self, spec: &ModelSpec) -> Gradients<B> {
        let trained = self.ranges.iter().enumerate().filter(|(index, _)| spec.params[*index].trainable);
        let places: Vec<_> =
            trained.map(|(index, &(offset, len))| (ParamId(index), SegmentId(0), offset, len)).collect();
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
        Ok(Self { buffer: buffer.expect("unsharded gradients are one buffer"), ranges: ranges(spec) })
    }
}

fn ranges(spec: &ModelSpec) -> Vec<(usize, usize)> {
    let mut offset = 0;
    let range = |param: &fsdp_core::model::ParamSpec| {
        offset += param.len();
        (offset - param.len(), param.len())
    };
    spec.params.iter().map(range).collect()
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
