//! The description of a model: its parameters, module tree and list of blocks.
//!
//! A **block** is a small, fixed piece of forward computation (an attention half, an MLP half). The list of blocks in
//! execution order never depends on how parameters are wrapped into units. Modules exist only for wrap policies.

pub use crate::id::{BlockId, ParamId};

use crate::dtype::DType;
use crate::error::Error;
use crate::scalars::Tallies;

/// The most elements that all parameters of a model may have together: several hundred times those of the largest
/// models, and 15 of 63 bits remain for factors such as bytes per element and copies of the model.
pub const ELEMENTS_MAX: usize = 1 << 48;

/// One parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParamSpec {
    /// Fully qualified name, as in the Hugging Face checkpoint of the model.
    pub fqn: String,
    /// Further names of the same (tied) parameter.
    pub aliases: Vec<String>,
    /// Shape; an empty shape is a scalar of one element.
    pub shape: Vec<usize>,
    /// Whether the parameter gets gradients and updates.
    pub trainable: bool,
    /// The number of the expert that it belongs to, among those of its mixture; `None` if it belongs to none.
    pub expert: Option<usize>,
    /// How it is stored, if not as numbers.
    pub quantized: Option<Quantized>,
    /// Whether it is gathered in the master dtype, whatever the dtype of the others.
    pub keep_f32: bool,
}

/// A frozen parameter that is kept and gathered as bytes, which its program decodes: rows of bytes, each decoded by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantized {
    /// Number of rows.
    pub rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

impl ParamSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the parameter has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The row length when the parameter is seen as a matrix (dim 0 counts the rows); `None` for parameters of fewer
    /// than two dimensions, which have no rows.
    pub fn row_len(&self) -> Option<usize> {
        (self.shape.len() >= 2).then(|| self.shape[1..].iter().product())
    }

    /// The dtype in which it is gathered, in a run with this dtype of parameters.
    pub fn gathered_dtype(&self, param_dtype: DType) -> DType {
        match (self.quantized, self.keep_f32) {
            (Some(_), _) => DType::U8,
            (None, true) => param_dtype.master(),
            (None, false) => param_dtype,
        }
    }

    /// Number of elements that are stored: bytes, if it is quantized.
    pub fn stored_len(&self) -> usize {
        self.quantized.map_or_else(|| self.len(), |it| it.rows * it.row_bytes)
    }

    /// As [`ParamSpec::row_len`], of what is stored.
    pub fn stored_row_len(&self) -> Option<usize> {
        self.quantized.map_or_else(|| self.row_len(), |it| Some(it.row_bytes))
    }
}

/// One node of the module tree. A module is listed after its parent; the first one is the root.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModuleSpec {
    /// Fully qualified name; empty for the root.
    pub fqn: String,
    /// Class name that wrap policies match (`LlamaDecoderLayer`).
    pub class: String,
    /// Index of the parent in [`ModelSpec::modules`]; `None` for the root only.
    pub parent: Option<usize>,
    /// The parameters that this module owns directly (not its children's).
    pub params: Vec<ParamId>,
}

/// One block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockSpec {
    /// Name in printed schedules (`layers.0.attention`).
    pub name: String,
    /// The parameters whose values the block reads.
    pub params: Vec<ParamId>,
    /// The repeated layer that the block belongs to, if any. Blocks of one layer are consecutive, and activation
    /// checkpointing recomputes whole layers.
    pub layer: Option<usize>,
}

/// The whole model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelSpec {
    /// All parameters, each once.
    pub params: Vec<ParamSpec>,
    /// The module tree.
    pub modules: Vec<ModuleSpec>,
    /// The blocks in execution order; the last one computes the loss.
    pub blocks: Vec<BlockSpec>,
    /// The sums and counts that blocks compute in addition to the loss.
    pub tallies: Tallies,
}

impl ModelSpec {
    /// Returns a parameter by id.
    pub fn param(&self, id: ParamId) -> &ParamSpec {
        &self.params[id.0]
    }

    /// Returns a block by id.
    pub fn block(&self, id: BlockId) -> &BlockSpec {
        &self.blocks[id.0]
    }

    /// Total number of elements of all parameters.
    pub fn elements(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }

    /// The first block that reads a trainable parameter, where backward ends; `None` if no block does.
    pub fn first_trainable_block(&self) -> Option<BlockId> {
        self.blocks
            .iter()
            .position(|block| block.params.iter().any(|&p| self.param(p).trainable))
            .map(BlockId)
    }

    /// Checks what the rest of the crate relies on: at most [`ELEMENTS_MAX`] elements, at least one block, a tree of
    /// modules that own every parameter exactly once, ids in range, unique names, and a use for every trainable
    /// parameter.
    ///
    /// # Errors
    /// [`Error::Model`] that names the module, block or parameter.
    pub fn validate(&self) -> Result<(), Error> {
        self.check_elements()?;
        let fail = |what: String| Err(Error::Model { what });
        if self.blocks.is_empty() {
            return fail("the model has no blocks".into());
        }
        let mut owners = vec![0usize; self.params.len()];
        for (index, module) in self.modules.iter().enumerate() {
            match module.parent {
                None if index > 0 => return fail(format!("module {} is a second root", module.fqn)),
                Some(parent) if parent >= index => {
                    return fail(format!("module {} is listed before its parent", module.fqn));
                }
                _ => {}
            }
            for id in &module.params {
                match owners.get_mut(id.0) {
                    Some(count) => *count += 1,
                    None => return fail(format!("module {} owns unknown parameter {}", module.fqn, id.0)),
                }
            }
        }
        let mut names = std::collections::BTreeSet::new();
        for (param, owners) in self.params.iter().zip(owners) {
            if owners != 1 {
                return fail(format!("parameter {} is owned by {owners} modules, not one", param.fqn));
            }
            if param.is_empty() {
                return fail(format!("parameter {} has no elements", param.fqn));
            }
            if param.quantized.is_some() && param.trainable {
                return fail(format!("parameter {} is quantized, so it cannot be trained", param.fqn));
            }
            for name in std::iter::once(&param.fqn).chain(&param.aliases) {
                if !names.insert(name) {
                    return fail(format!("two parameters are called {name}"));
                }
            }
        }
        let mut is_read = vec![false; self.params.len()];
        for block in &self.blocks {
            for id in &block.params {
                match is_read.get_mut(id.0) {
                    Some(read) => *read = true,
                    None => return fail(format!("block {} reads unknown parameter {}", block.name, id.0)),
                }
            }
        }
        let mut params = self.params.iter().zip(is_read);
        if let Some((param, _)) = params.find(|(param, is_read)| param.trainable && !is_read) {
            return fail(format!("no block reads parameter {}, so it cannot be trained", param.fqn));
        }
        Ok(())
    }

    /// Checks that no quantity computed from sizes (elements and bytes of shards and slots, and their sums) can
    /// overflow.
    fn check_elements(&self) -> Result<(), Error> {
        let mut elements = 0usize;
        for param in &self.params {
            let len = param.shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
            let sum = len.and_then(|len| elements.checked_add(len)).filter(|&sum| sum <= ELEMENTS_MAX);
            elements = sum.ok_or_else(|| Error::Model {
                what: format!(
                    "more than {ELEMENTS_MAX} (2^48) elements, counting {} of shape {:?}; choose smaller sizes",
                    param.fqn, param.shape
                ),
            })?;
        }
        Ok(())
    }
}
