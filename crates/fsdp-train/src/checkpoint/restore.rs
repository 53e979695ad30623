//! Fills an engine from a checkpoint: every rank of the first replica reads its rows, independent of which ranks wrote
//! them.

use fsdp_ckpt::native::NativeReader;
use fsdp_ckpt::safetensors::TensorType;
use fsdp_core::Memory;
use fsdp_core::engine::{Engine, Origin};
use fsdp_core::model::ModelSpec;
use fsdp_core::program::Program;

use super::run_state::RunState;
use super::table::{STEPS, is_saved, rows_of, state_name, state_rows};
use crate::error::TrainError;
use crate::init::InitSource;

/// Loads this rank's parameters and optimizer state and checks that all state belongs to one step. A frozen base, which
/// no checkpoint holds, is read from its original source. Ranks of later replicas receive what the first replica reads.
///
/// # Errors
/// [`TrainError::Checkpoint`]: a file that is missing or damaged. [`TrainError::Input`]: states of several steps.
pub(crate) fn restore<M: Memory, P: Program<M>>(
    engine: &mut Engine<M, P>,
    reader: &NativeReader,
    init: &InitSource,
) -> Result<(), TrainError> {
    let plan = engine.plan();
    let (spec, saves_frozen) = (plan.spec.clone(), is_saved(plan, false));
    let mut rows = Rows::of(reader);
    if engine.reads() {
        check_steps(&spec, &mut rows)?;
    }
    engine.load_params(Origin::Read, |piece, values| -> Result<(), TrainError> {
        let param = spec.param(piece.param);
        if !(param.trainable || saves_frozen) {
            return init.fill(&spec, piece, values);
        }
        rows.read(&param.fqn, rows_of(param, piece.param_offset, piece.len), values)
    })?;
    engine.load_state(Origin::Read, |tensor, piece, values| -> Result<(), TrainError> {
        let param = spec.param(piece.param);
        rows.read(&state_name(param, tensor.name), state_rows(param, piece), values)
    })
}

/// Compares the step count of every trained parameter with the number of updates that the run has applied to it.
fn check_steps(spec: &ModelSpec, rows: &mut Rows<'_>) -> Result<(), TrainError> {
    let run = RunState::read(rows.reader)?;
    for param in spec.params.iter().filter(|param| param.trainable) {
        let (name, mut step) = (state_name(param, STEPS), [0.0]);
        rows.read(&name, 0..1, &mut step)?;
        let done = run.updates().saturating_sub(run.late.get(&param.fqn).copied().unwrap_or(0));
        if step[0] != f64::from(done as f32) {
            return Err(TrainError::Input(format!(
                "{}: tensor {name} counts {} steps, the rest of the checkpoint {done}; it was not written by a single run, \
                 resume from another checkpoint",
                rows.reader.dir().display(),
                step[0]
            )));
        }
    }
    Ok(())
}

/// Reads rows through one reused buffer.
pub(super) struct Rows<'a> {
    reader: &'a NativeReader,
    bytes: Vec<u8>,
}

impl<'a> Rows<'a> {
    pub(super) fn of(reader: &'a NativeReader) -> Self {
        Self { reader, bytes: Vec::new() }
    }
}

impl Rows<'_> {
    /// Reads rows of a tensor of floats, or of the bytes of coded moments.
    pub(super) fn read(
        &mut self,
        name: &str,
        rows: std::ops::Range<usize>,
        values: &mut [f64],
    ) -> Result<(), TrainError> {
        let dtype = self.reader.manifest().tensors.get(name).map_or(TensorType::F32, |tensor| tensor.dtype);
        self.bytes.resize(values.len() * dtype.size_bytes(), 0);
        self.reader.read_rows(name, rows, &mut self.bytes)?;
        match dtype {
            TensorType::F64 => decode(&self.bytes, values, f64::from_le_bytes),
            TensorType::U8 => decode(&self.bytes, values, |[byte]| byte.into()),
            _ => decode(&self.bytes, values, |bytes| f32::from_le_bytes(bytes).into()),
        }
        Ok(())
    }
}

fn decode<const N: usize>(bytes: &[u8], values: &mut [f64], number: impl Fn([u8; N]) -> f64) {
    let (elements, _) = bytes.as_chunks();
    values.iter_mut().zip(elements).for_each(|(value, &element)| *value = number(element));
}
