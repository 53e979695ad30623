//! A copy of the part of the state that one rank saves, so that training can continue while it is written.
//!
//! The buffers are allocated before the first step, or else by the first save; later ones reuse them.

use std::collections::TryReserveError;

use fsdp_core::engine::{Engine, UnitShards};
use fsdp_core::memory::{Category, HostSliceMut, Slice};
use fsdp_core::program::Program;
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Memory, MemoryKind, OutOfMemory, Queue};

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
        self.claim(engine, held)?;
        for (held, values) in held.iter().zip(&mut self.values) {
            values.copy(engine, held.place, (step, late))?;
        }
        Ok(())
    }

    /// Allocates the memory of the copy, without touching it.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn claim<M: Memory, P: Program<M>>(
        &mut self,
        engine: &Engine<M, P>,
        held: &[Held],
    ) -> Result<(), TrainError> {
        if self.values.is_empty() {
            let claimed: Result<_, _> = held.iter().map(|held| Values::claim(engine, held.place)).collect();
            self.values = claimed.map_err(fsdp_core::Error::from)?;
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
    /// Empty values with room for those of a place.
    fn claim<M: Memory, P: Program<M>>(
        engine: &Engine<M, P>,
        place: ValueLocation,
    ) -> Result<Self, OutOfMemory> {
        let (dtype, len, category) = match place {
            ValueLocation::Steps { .. } => (DType::F32, 1, Category::OptimizerState),
            ValueLocation::Params { len, .. } => {
                (engine.plan().policy.param_dtype.master(), len, Category::ParameterShard)
            }
            ValueLocation::State { unit, segment, tensor, len, .. } => {
                let dtype = engine.shards(UnitId(unit)).state_tensors[segment][tensor].dtype;
                (dtype, len, Category::OptimizerState)
            }
        };
        let full = |_| OutOfMemory {
            kind: MemoryKind::Host,
            category,
            bytes: Some(len * dtype.size_bytes()),
            in_use: "it is for the copy that a checkpoint is written from".to_owned(),
        };
        match dtype {
            DType::F64 => with_room(len).map(Values::F64),
            DType::U8 => with_room(len).map(Values::U8),
            _ => with_room(len).map(Values::F32),
        }
        .map_err(full)
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
            Values::F32(values) => HostSliceMut::F32(filled(values, slice.len)),
            Values::F64(values) => HostSliceMut::F64(filled(values, slice.len)),
            Values::U8(values) => HostSliceMut::U8(filled(values, slice.len)),
        };
        Ok(engine.memory().read(Queue::Compute, slice, out)?)
    }
}

/// An empty vector with room for `len` values.
fn with_room<T>(len: usize) -> Result<Vec<T>, TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map(|()| values)
}

/// The values, `len` of them, for which there is room.
fn filled<T: Clone + Default>(values: &mut Vec<T>, len: usize) -> &mut [T] {
    values.resize(len, T::default());
    values
}
