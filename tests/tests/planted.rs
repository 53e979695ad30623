//! Ranks whose MLP misbehaves in one of its blocks: it fails, panics, leaks or allocates.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fsdp_core::memory::{Category, Memory};
use fsdp_core::{DType, Error};
use fsdp_nn::backend::Operands;
use fsdp_nn::model::MlpConfig;
use fsdp_nn::op::{Head, Linear, Lookup, Op};
use fsdp_nn::{Backend, HostBuffer, HostMemory, HostOptions, ModelError};
use fsdp_sim::{ThreadOptions, Threads};

use crate::hooked::Hooked;

/// The misbehavior of a block; it happens when the block runs forward.
#[derive(Clone, Copy)]
pub(crate) enum Deed {
    /// Nothing.
    Nothing,
    /// The block fails from this call on (counted from 0).
    FailAt(usize),
    /// The block panics at this call.
    PanicAt(usize),
    /// Each call from this one on leaks a buffer of a category.
    LeakFrom(usize, Category),
    /// Each call allocates a buffer of a category and a number of elements, and drops it at once.
    Temporary(Category, usize),
}

/// A model whose blocks differ in their operations.
pub(crate) fn mlp() -> MlpConfig {
    MlpConfig { vocab: 7, widths: vec![3, 5, 4], bias: true, tied: false, std: 0.2 }
}

/// Returns index and name of the block that starts with an operation; `None` if none does.
fn begun_by(op: &Op) -> Option<(usize, &'static str)> {
    match op {
        Op::Lookup(Lookup::Embedding { .. }) => Some((0, "embedding")),
        Op::Linear(Linear::Forward { dims, .. }) if dims.inputs == 3 => Some((1, "layers.0")),
        Op::Linear(Linear::Forward { .. }) => Some((2, "layers.1")),
        Op::Head(Head::Loss { .. }) | Op::Head(Head::LossBackward { .. }) => Some((3, "head")),
        _ => None,
    }
}

/// The number of calls on all ranks that misbehave, and the buffers they leaked.
#[derive(Default)]
struct Done {
    calls: AtomicUsize,
    leaked: Mutex<Vec<HostBuffer>>,
}

impl Done {
    fn act(&self, deed: Deed, name: &str, memory: &HostMemory) -> Result<(), Error> {
        if matches!(deed, Deed::Nothing) {
            return Ok(());
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match deed {
            Deed::FailAt(at) if call >= at => {
                let source = ModelError::Width { op: "planted", expected: 1, got: 2 };
                Err(Error::Program { block: name.into(), source: Box::new(source) })
            }
            Deed::PanicAt(at) if call == at => panic!("planted panic"),
            Deed::LeakFrom(from, category) if call >= from => {
                self.leaked.lock().unwrap().push(memory.allocate(category, DType::F32, 3)?);
                Ok(())
            }
            Deed::Temporary(category, len) => memory.allocate(category, DType::F32, len).map(drop),
            _ => Ok(()),
        }
    }
}

/// Ranks as threads, each with its own deed in a block. Calls are counted over all ranks that have a deed.
pub(crate) fn ranks(
    options: ThreadOptions,
    block: usize,
    deed: impl Fn(usize) -> Deed + Send + Sync + 'static,
) -> Threads<Hooked<HostMemory>> {
    let done = Arc::<Done>::default();
    Threads::new(options, move |rank, _| {
        let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
        let (deed, done) = (deed(rank.0), Arc::clone(&done));
        let hook = move |memory: &HostMemory, op: &Op, operands: Operands<'_, '_, HostBuffer>| {
            if let Some((_, name)) = begun_by(op).filter(|(begun, _)| *begun == block) {
                done.act(deed, name, memory)?;
            }
            memory.execute(op, operands)
        };
        Ok(Arc::new(Hooked::new(HostMemory::new(options)?, Arc::new(hook))))
    })
}
