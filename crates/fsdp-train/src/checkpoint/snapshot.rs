//! A copy of the part of the state that one rank saves, so that training can continue while it is written.
//!
//! The first save allocates the buffers; later ones reuse them.

use fsdp_core::engine::{Engine, UnitShards};
use fsdp_core::memory::{HostSliceMut, Slice};
use fsdp_core::program::Program;
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Memory, Queue};

use super::table::{Held, ValueLocation};
use crate::error::TrainError;
use crate::rule::LateParams;

/// The values that a rank saves, in the order of its part of the table.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    values: Vec<Values>,
}

#[derive(Debug)]
enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
    U8(Vec<u8>),
}

impl Snapshot {
    /// Copies the state of an engine that has applied `step` steps, of which some parameters missed the first ones.
    ///
    /// # Errors
    /// Errors of the memory.
    pub(super) fn take<M: Memory, P: Program<M>>(
        &mut self,
        engine: &Engine<M, P>,
        held: &[Held],
        step: u64,
        late: &LateParams,
    ) -> Result<(), TrainError> {
        if self.values.is_empty() {
            self.values = held.iter().map(|held| Values::zeroed(engine, held.place)).collect();
        }
        for (held, values) in held.iter().zip(&mut self.values) {
            values.copy(engine, held.place, (step, late))?;
        }
        Ok(())
    }

    /// The values of one entry, as bytes of a file.
    pub(super) fn bytes(&self, index: usize) -> &[u8] {
        match &self.values[index] {
            Values::F32(values) => bytemuck::cast_slice(values),
            Values::F64(values) => bytemuck::cast_slice(values),
            Values::U8(values) => values,
        }
    }
}

impl Values {
    fn zeroed<M: Memory, P: Program<M>>(engine: &Engine<M, P>, place: ValueLocation) -> Self {
        let (dtype, len) = match place {
            ValueLocation::Steps { .. } => (DType::F32, 1),
            ValueLocation::Params { len, .. } => (engine.plan().policy.param_dtype.master(), len),
            ValueLocation::State { unit, segment, tensor, len, .. } => {
                (engine.shards(UnitId(unit)).state_tensors[segment][tensor].dtype, len)
            }
        };
        match dtype {
            DType::F64 => Values::F64(vec![0.0; len]),
            DType::U8 => Values::U8(vec![0; len]),
            _ => Values::F32(vec![0.0; len]),
        }
    }

    fn copy<M: Memory, P: Program<M>>(
        &mut self,
        engine: &Engine<M, P>,
        place: ValueLocation,
        (step, late): (u64, &LateParams),
    ) -> Result<(), TrainError> {
        let shards: UnitShards<'_, M::Buffer>;
        let slice = match place {
            ValueLocation::Params { unit, segment, offset, len } => {
                shards = engine.shards(UnitId(unit));
                Slice::new(shards.params[segment], offset, len)
            }
            ValueLocation::State { unit, segment, tensor, offset, len } => {
                shards = engine.shards(UnitId(unit));
                Slice::new(shards.state[segment][tensor], offset, len)
            }
            ValueLocation::Steps { param } => {
                let late = late.get(&engine.plan().spec.param(param).fqn).copied().unwrap_or(0);
                *self = Values::F32(vec![step.saturating_sub(late) as f32]);
                return Ok(());
            }
        };
        let out = match self {
            Values::F32(values) => HostSliceMut::F32(values),
            Values::F64(values) => HostSliceMut::F64(values),
            Values::U8(values) => HostSliceMut::U8(values),
        };
        Ok(engine.memory().read(Queue::Compute, slice, out)?)
    }
}
