//! Adapters of experts. transformers has the weights of a mixture's experts as stacks, and PEFT adapts a stack as one parameter: its
//! `A` has the rows of each expert, one expert after the other, and its `B` the columns of all experts in turns.
//!
//! ```text
//! A of the stack: experts * rank x inputs     row e * rank + k is row k of expert e
//! B of the stack: outputs x rank * experts    column k * experts + e is column k of expert e
//! ```
//!
//! Here every expert has its own matrices, which are sharded with it, and where experts have gate and up as two maps, a `B` for
//! each. A run exports them one by one, and its first rank then writes the stacks.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_ckpt::checkpoint::{StackPlace, stack_in_memory};
use fsdp_ckpt::model_files::ModelReader;
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_nn::layer::Description;

use super::peft;
use crate::error::TrainError;

/// The maps of experts, as ranges of [`Description::experts`], that are one stack in memory, and its name.
pub(super) fn of_maps(description: &Description) -> Vec<(String, Range<usize>)> {
    let mut stacks: Vec<(String, Range<usize>)> = Vec::new();
    for (index, maps) in description.experts.iter().enumerate() {
        let Some(place) = stack_in_memory(&description.spec.param(maps.weights[0]).fqn) else { continue };
        match stacks.last_mut().filter(|(name, _)| *name == place.stack) {
            Some((_, maps)) => maps.end = index + 1,
            None => stacks.push((place.stack, index..index + 1)),
        }
    }
    stacks
}

/// The place of one matrix of an expert in PEFT's tensor of its stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The name of the tensor.
    pub(crate) tensor: String,
    /// Its shape.
    pub(crate) shape: [usize; 2],
    first_row: usize,
    first_column: usize,
    /// Columns of the tensor from one column of the matrix to the next.
    stride: usize,
    columns: usize,
}

impl Part {
    /// Reads rows of the matrix from the tensor.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn read(
        &self,
        file: &ModelReader,
        rows: Range<usize>,
        values: &mut [f64],
    ) -> Result<(), TrainError> {
        let mut stack = vec![0.0; rows.len() * self.shape[1]];
        file.read_rows_f64(&self.tensor, self.first_row + rows.start..self.first_row + rows.end, &mut stack)?;
        for (row, values) in stack.chunks(self.shape[1]).zip(values.chunks_mut(self.columns)) {
            let row = row[self.first_column..].iter().step_by(self.stride);
            values.iter_mut().zip(row).for_each(|(value, of_stack)| *value = *of_stack);
        }
        Ok(())
    }

    /// Writes the matrix to its place in the tensor.
    pub(crate) fn write(&self, values: &[f64], stack: &mut [f64]) {
        let stack = stack.chunks_mut(self.shape[1]).skip(self.first_row);
        for (row, values) in stack.zip(values.chunks(self.columns)) {
            let row = row[self.first_column..].iter_mut().step_by(self.stride);
            row.zip(values).for_each(|(of_stack, value)| *of_stack = *value);
        }
    }
}

/// The places of all matrices of experts' adapters.
pub(crate) fn parts(spec: &ModelSpec) -> BTreeMap<ParamId, Part> {
    let params = spec.params.iter().enumerate();
    let matrices = params.filter_map(|(id, param)| Some((ParamId(id), param, place(param)?)));
    let matrices: Vec<(ParamId, &ParamSpec, (StackPlace, Half))> = matrices.collect();
    let (mut experts, mut last) = (BTreeMap::new(), BTreeMap::new());
    for (.., (StackPlace { stack, place, slots }, _)) in &matrices {
        let count: &mut usize = experts.entry(stack).or_default();
        *count = (*count).max(*place as usize / slots + 1);
        last.insert(module(stack), stack);
    }
    let part =
        |(id, param, (StackPlace { stack, place, slots }, half)): &(_, &ParamSpec, (StackPlace, Half))| {
            let (experts, [rows, columns]) = (experts[stack], [param.shape[0], param.shape[1]]);
            let (expert, slot) = (*place as usize / slots, *place as usize % slots);
            // PEFT wraps the module of the stacks once for each, and the last one is outermost.
            let inner = if last[module(stack)] == stack { "" } else { ".base_layer" };
            let tensor = |name: &str| format!("{}{}{inner}.{name}.weight", peft::PREFIX, module(stack));
            let part = match half {
                Half::Down => Part {
                    tensor: tensor("lora_A"),
                    shape: [experts * rows, columns],
                    first_row: expert * rows,
                    first_column: 0,
                    stride: 1,
                    columns,
                },
                Half::Up => Part {
                    tensor: tensor("lora_B"),
                    shape: [slots * rows, columns * experts],
                    first_row: slot * rows,
                    first_column: expert,
                    stride: experts,
                    columns,
                },
            };
            (*id, part)
        };
    matrices.iter().map(part).collect()
}

/// Which of the two matrices of an adapter.
#[derive(Clone, Copy, Debug)]
enum Half {
    Down,
    Up,
}

/// The place of the weight that a matrix adapts, if it adapts one of an expert.
fn place(param: &ParamSpec) -> Option<(StackPlace, Half)> {
    let halves = [(".lora_A.weight", Half::Down), (".lora_B.weight", Half::Up)];
    let (map, half) =
        halves.into_iter().find_map(|(end, half)| Some((param.fqn.strip_suffix(end)?, half)))?;
    let place = stack_in_memory(&format!("{map}.weight")).or_else(|| stack_in_memory(map))?;
    Some((place, half))
}

/// The module of a stack.
fn module(stack: &str) -> &str {
    stack.rsplit_once('.').map_or("", |(module, _)| module)
}
