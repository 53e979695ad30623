//! A model with something done before one of its blocks: to fail, to leak, to allocate.

use std::any::{Any, TypeId};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fsdp_core::Error;
use fsdp_core::memory::Category;
use fsdp_core::model::BlockId;
use fsdp_nn::layer::{Description, Head};
use fsdp_nn::model::{Architecture, Mlp};
use fsdp_nn::tape::{Tape, Tensor};
use fsdp_nn::{Backend, HostMemory, ModelError};

/// What is done whenever the block runs on host memory (but not when the ledger runs it on shapes).
#[derive(Clone)]
pub(crate) enum Deed {
    /// Nothing.
    Nothing,
    /// From this call on (counted from 0) the model's code fails.
    FailAt(usize),
    /// At this call the model's code panics.
    PanicAt(usize),
    /// From this call on a buffer of a category is kept alive.
    LeakFrom(usize, Category),
    /// A buffer of a category and a number of elements is allocated and dropped at once.
    Temporary(Category, usize),
}

/// An MLP with a deed before its block `block`.
#[derive(Clone)]
pub(crate) struct Wrapped {
    inner: Mlp,
    block: usize,
    deed: Deed,
    calls: Arc<AtomicUsize>,
    kept: Arc<Mutex<Vec<Box<dyn Any + Send>>>>,
}

impl Wrapped {
    pub(crate) fn new(inner: Mlp, block: usize, deed: Deed) -> Self {
        Self { inner, block, deed, calls: Arc::default(), kept: Arc::default() }
    }

    fn act<M: Backend>(&self, tape: &Tape<'_, M>) -> Result<(), Error> {
        let scope = tape.scope();
        if scope.block.0 != self.block || TypeId::of::<M>() != TypeId::of::<HostMemory>() {
            return Ok(());
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match self.deed {
            Deed::FailAt(at) if call >= at => {
                Err(scope.error(ModelError::Width { op: "planted", expected: 1, got: 2 }))
            }
            Deed::PanicAt(at) if call == at => panic!("planted panic"),
            Deed::LeakFrom(from, category) if call >= from => {
                let buffer = scope.allocate(category, 3)?;
                self.kept.lock().unwrap().push(Box::new(buffer));
                Ok(())
            }
            Deed::Temporary(category, len) => scope.allocate(category, len).map(drop),
            _ => Ok(()),
        }
    }
}

impl Architecture for Wrapped {
    fn description(&self) -> &Description {
        self.inner.description()
    }

    fn head(&self) -> Head {
        self.inner.head()
    }

    fn first<M: Backend>(&self, tape: &mut Tape<'_, M>) -> Result<Tensor<M>, Error> {
        self.act(tape)?;
        self.inner.first(tape)
    }

    fn middle<M: Backend>(
        &self,
        block: BlockId,
        tape: &mut Tape<'_, M>,
        x: Tensor<M>,
    ) -> Result<Tensor<M>, Error> {
        self.act(tape)?;
        self.inner.middle(block, tape, x)
    }

    fn last<M: Backend>(&self, tape: &mut Tape<'_, M>, x: Tensor<M>) -> Result<Tensor<M>, Error> {
        self.act(tape)?;
        self.inner.last(tape, x)
    }
}
