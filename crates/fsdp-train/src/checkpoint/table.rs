//! Which rows of which tensors each rank saves.
//!
//! Parameters are stored under their FQN, and optimizer state under `optim.state.<FQN>.<name>`, as in PyTorch's
//! distributed checkpoints, including the step count that PyTorch's optimizers expect. State with one value per column
//! is equal on all ranks that hold rows of the parameter; the first of these ranks saves it. Ranks of later replicas
//! hold copies and save nothing.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_ckpt::checkpoint::{Key, Role};
use fsdp_ckpt::native::SavedTensor;
use fsdp_ckpt::safetensors::TensorSpec;
use fsdp_core::DType;
use fsdp_core::model::{ParamId, ParamSpec};
use fsdp_core::plan::Plan;
use fsdp_core::update::{RuleState, StateAxis, StatePiece, StateTensor};

/// The name of a parameter's step count, a 0-d `f32` as in PyTorch.
pub(super) const STEPS: &str = "step";

/// All tensors of a training state, and what each rank saves of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StateTable {
    /// All tensors, parameters first, with the rows that each rank saves.
    pub(crate) tensors: Vec<SavedTensor>,
    /// The entries that each rank saves, by shard index, in the order of `tensors`.
    pub(crate) held: Vec<Vec<Held>>,
}

/// One tensor's rows that a rank saves, as listed in [`SavedTensor`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Index into [`StateTable::tensors`].
    pub(crate) tensor: usize,
    /// Where the rank holds the values.
    pub(crate) place: ValueLocation,
}

/// Location of values on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueLocation {
    /// Master parameters of a segment.
    Params { unit: usize, segment: usize, offset: usize, len: usize },
    /// A state tensor of a unit; `segment` counts only trainable segments.
    State { unit: usize, segment: usize, tensor: usize, offset: usize, len: usize },
    /// The number of steps of a parameter.
    Steps { param: ParamId },
}

impl StateTable {
    /// Builds the table for a plan and an update rule.
    pub(crate) fn new(plan: &Plan, rule: &dyn RuleState) -> Self {
        let table = Self { tensors: Vec::new(), held: Vec::new() };
        let mut builder = Builder { plan, table, index: BTreeMap::new() };
        for param in plan.spec.params.iter().filter(|param| is_saved(plan, param.trainable)) {
            let (name, shape) = (param.fqn.clone(), param.shape.clone());
            let path = vec![Key::Name(name.clone())];
            let dtype = plan.policy.param_dtype.master().into();
            builder.tensor(TensorSpec { name, dtype, shape }, path, Role::Model);
        }
        for shard in 0..plan.mesh.shards() {
            builder.shard(rule, shard);
        }
        builder.table
    }
}

/// Whether a run saves its trained (`trainable`) or its frozen parameters. The frozen base of an adapter is not
/// saved, which keeps checkpoints small: it is read again from its original files.
pub(super) fn is_saved(plan: &Plan, trainable: bool) -> bool {
    trainable || plan.policy.frozen_master
}

/// The name of a state tensor of a parameter.
pub(crate) fn state_name(param: &ParamSpec, name: &str) -> String {
    format!("optim.state.{}.{name}", param.fqn)
}

/// The rows of a parameter that a piece of `len` elements, starting at element `first`, covers.
pub(super) fn rows_of(param: &ParamSpec, first: usize, len: usize) -> Range<usize> {
    let row_len = param.row_len().unwrap_or(1);
    first / row_len..(first + len) / row_len
}

/// The rows of the saved state tensor that a piece covers.
pub(super) fn state_rows(param: &ParamSpec, piece: &StatePiece) -> Range<usize> {
    match piece.axis {
        StateAxis::Elements => rows_of(param, piece.first, piece.len),
        StateAxis::Rows | StateAxis::Columns => piece.first..piece.first + piece.len,
        StateAxis::Blocks(_) => {
            let blocks = state_shape(param, piece.axis)[1];
            piece.first / blocks..(piece.first + piece.len) / blocks
        }
    }
}

/// The shape of a whole state tensor.
pub(crate) fn state_shape(param: &ParamSpec, axis: StateAxis) -> Vec<usize> {
    let row_len = param.row_len().unwrap_or(1);
    match axis {
        StateAxis::Elements => param.shape.clone(),
        StateAxis::Rows => vec![param.len() / row_len],
        StateAxis::Columns => vec![row_len],
        StateAxis::Blocks(len) => vec![param.len() / row_len, row_len.div_ceil(len)],
    }
}

struct Builder<'a> {
    plan: &'a Plan,
    table: StateTable,
    index: BTreeMap<String, usize>,
}

impl Builder<'_> {
    /// Returns the index of a tensor, adding it if it is new.
    fn tensor(&mut self, spec: TensorSpec, path: Vec<Key>, role: Role) -> usize {
        let next = self.table.tensors.len();
        let index = *self.index.entry(spec.name.clone()).or_insert(next);
        if index == next {
            let rows = vec![0..0; self.plan.mesh.shards()];
            self.table.tensors.push(SavedTensor { spec, path, role, rows });
        }
        index
    }

    fn state_tensor(&mut self, param: ParamId, name: &str, dtype: DType, shape: Vec<usize>) -> usize {
        let param = self.plan.spec.param(param);
        let path = ["optim", "state", &param.fqn, name].map(|step| Key::Name(step.to_owned())).to_vec();
        let spec = TensorSpec { name: state_name(param, name), dtype: dtype.into(), shape };
        self.tensor(spec, path, Role::Optimizer)
    }

    fn shard(&mut self, rule: &dyn RuleState, shard: usize) {
        let dtype = self.plan.policy.param_dtype.master();
        self.table.held.push(Vec::new());
        for (unit, layout) in self.plan.layout.units.iter().enumerate() {
            let mut trainable = 0;
            for (segment, shape) in layout.segments.iter().enumerate() {
                let pieces = shape.pieces(shard);
                for piece in pieces.iter().filter(|_| is_saved(self.plan, shape.trainable)) {
                    let param = self.plan.spec.param(piece.param);
                    let rows = rows_of(param, piece.param_offset, piece.len);
                    let place = ValueLocation::Params { unit, segment, offset: piece.offset, len: piece.len };
                    let tensor = self.index[&param.fqn];
                    self.hold(shard, tensor, rows, place);
                }
                if !shape.trainable {
                    continue;
                }
                for (tensor, state) in rule.state(&pieces, shape.shard_len(), dtype).iter().enumerate() {
                    for piece in &state.pieces {
                        self.state(shard, [unit, trainable, tensor], state, piece);
                    }
                }
                // The rank with the first row of a parameter saves its step count.
                for piece in pieces.iter().filter(|piece| piece.param_offset == 0) {
                    let tensor = self.state_tensor(piece.param, STEPS, DType::F32, Vec::new());
                    self.hold(shard, tensor, 0..1, ValueLocation::Steps { param: piece.param });
                }
                trainable += 1;
            }
        }
        self.table.held[shard].sort_by_key(|held| held.tensor);
    }

    fn state(
        &mut self,
        shard: usize,
        [unit, segment, tensor]: [usize; 3],
        state: &StateTensor,
        piece: &StatePiece,
    ) {
        let param = self.plan.spec.param(piece.param);
        let shape = state_shape(param, piece.axis);
        let index = self.state_tensor(piece.param, state.name, state.dtype, shape);
        // Columns are equal on all ranks: the first one saves them.
        let is_saved = self.table.tensors[index].rows.iter().any(|rows| !rows.is_empty());
        if piece.axis == StateAxis::Columns && is_saved {
            return;
        }
        let place = ValueLocation::State { unit, segment, tensor, offset: piece.offset, len: piece.len };
        self.hold(shard, index, state_rows(param, piece), place);
    }

    fn hold(&mut self, shard: usize, tensor: usize, rows: Range<usize>, place: ValueLocation) {
        self.table.tensors[tensor].rows[shard] = rows;
        self.table.held[shard].push(Held { tensor, place });
    }
}
