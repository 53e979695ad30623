//! Rotary positions and causal self-attention over packed projections.

use fsdp_core::Error;
use fsdp_core::memory::{Category, Slice, SliceMut};

use crate::backend::{AttentionDims, Backend, Dropout};
use crate::conformance::Calls;
use crate::layer::{Attention, Rope};
use crate::tape::products::Origin;
use crate::tape::{Backward, Node, Tape, Tensor, Value};

impl<M: Backend> Tape<'_, M> {
    /// Rotates queries and keys of packed rows, in place if nobody else reads them.
    ///
    /// # Errors
    /// A width that does not fit, or those of the memory.
    pub fn rope(&mut self, qkv: Tensor<M>, heads: &Attention, rope: &Rope) -> Result<Tensor<M>, Error> {
        self.check("rope", &qkv, heads.packed())?;
        let scope = &self.scope;
        let dims = heads.dims(scope.batch.batch, scope.batch.seq);
        let input = qkv.value();
        let mut rotated = scope.writable(Category::Activation, qkv.into_buffer())?;
        scope.memory.rope(dims, &rope.inverse_frequencies, SliceMut::whole(&mut rotated), false)?;
        let output = self.value(input.needs_gradient);
        if output.needs_gradient {
            self.record(RopeNode { input, output, dims, rope: rope.clone() });
        }
        Ok(Tensor::new(rotated, output, heads.packed()))
    }

    /// Causal self-attention of packed rows.
    ///
    /// # Errors
    /// A width that does not fit, or those of the memory.
    pub fn attention(&mut self, qkv: Tensor<M>, heads: &Attention) -> Result<Tensor<M>, Error> {
        self.check("attention", &qkv, heads.packed())?;
        let mask = self.mask(heads.dropout);
        let scope = &self.scope;
        let dims = heads.dims(scope.batch.batch, scope.batch.seq);
        let width = heads.heads * heads.head_dim;
        let input = qkv.value();
        let output = self.value(input.needs_gradient);
        let [y, lse] = match self.products.next() {
            Origin::Kept(kept) => {
                kept.try_into().unwrap_or_else(|_| panic!("attention was replayed as itself"))
            }
            Origin::Computed => self.attend(dims, mask.as_ref(), &qkv, output)?,
            Origin::Unread => unreachable!("backward of attention reads its output"),
        };
        if let Some(mark) = self.products.note(&[y.clone(), lse.clone()]) {
            mark.read();
        }
        if output.needs_gradient {
            let (qkv, y) = (qkv.into_buffer(), y.clone());
            self.record(AttentionNode::<M> { input, output, dims, mask, qkv, y, lse });
        }
        Ok(Tensor::new(y, output, width))
    }

    /// The output of attention and its statistics.
    fn attend(
        &self,
        dims: AttentionDims,
        mask: Option<&Mask>,
        qkv: &Tensor<M>,
        output: Value,
    ) -> Result<[M::Buffer; 2], Error> {
        let scope = &self.scope;
        let is_kept = output.needs_gradient || self.products.are_kept();
        let category = if is_kept { Category::Activation } else { Category::Workspace };
        let mut y = scope.allocate(Category::Activation, dims.rows() * dims.heads * dims.head_dim)?;
        let mut lse = scope.statistics(category, dims.rows() * dims.heads)?;
        let (out, sums) = (SliceMut::whole(&mut y), SliceMut::whole(&mut lse));
        scope.memory.attention(dims, mask.map(Mask::dropout), qkv.slice(), out, sums)?;
        Ok([y, lse])
    }
}

/// The dropout mask of one place in the model, one key per sample.
pub(super) struct Mask {
    p: f64,
    keys: Vec<u64>,
}

impl Mask {
    pub(super) fn dropout(&self) -> Dropout<'_> {
        Dropout { p: self.p, keys: &self.keys }
    }
}

impl<M: Backend> Tape<'_, M> {
    /// The mask of the next dropout site, if dropout acts there.
    pub(super) fn mask(&mut self, p: f64) -> Option<Mask> {
        let site = self.next_site();
        let batch = self.scope.batch;
        (batch.training && p > 0.0).then(|| Mask { p, keys: batch.dropout_keys(self.scope.block, site) })
    }
}

struct RopeNode {
    input: Value,
    output: Value,
    dims: AttentionDims,
    rope: Rope,
}

impl<M: Backend> Node<M> for RopeNode {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(mut gradient) = walk.take_for(self.output, self.input)? else { return Ok(()) };
        let rows = SliceMut::whole(&mut gradient.buffer);
        walk.scope.memory.rope(self.dims, &self.rope.inverse_frequencies, rows, true)?;
        walk.put(self.input, gradient)
    }
}

struct AttentionNode<M: Backend> {
    input: Value,
    output: Value,
    dims: AttentionDims,
    mask: Option<Mask>,
    qkv: M::Buffer,
    y: M::Buffer,
    lse: M::Buffer,
}

impl<M: Backend> Node<M> for AttentionNode<M> {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(dy) = walk.take(self.output) else { return Ok(()) };
        let dims = self.dims;
        walk.write_with(self.input, dims.rows() * dims.packed(), |walk, dqkv| {
            let dropout = self.mask.as_ref().map(Mask::dropout);
            let (qkv, y) = (Slice::whole(&self.qkv), Slice::whole(&self.y));
            let (lse, dy) = (Slice::whole(&self.lse), Slice::whole(&dy));
            walk.scope.memory.attention_backward(dims, dropout, qkv, y, lse, dy, dqkv)
        })
    }
}
