//! Heads of multi-head latent attention (DeepSeek V2), which are made of narrower maps than those of other attention.
//!
//! A query or key head has elements without position and elements that rotate; the rotating part of the key is shared by
//! all heads. Values may be of another width. Here they become the packed rows of [`Attention`](super::Attention): in
//! each head the rotating elements first, as [`Attention::Rope`](super::Attention::Rope) wants them, and zeros after the
//! narrower of queries and values. Scores do not depend on the order of elements, and zeros add nothing.

use fsdp_core::Error;

use super::describe::{Description, Role};
use crate::graph::{Backward, Builder, Call, Node, Tensor};
use crate::op::Op;

/// Sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LatentDims {
    /// Number of rows.
    pub rows: usize,
    /// Number of heads, of queries as of keys.
    pub heads: usize,
    /// Elements of a query or key head without position.
    pub fixed: usize,
    /// Elements of a query or key head that rotate; even.
    pub rotating: usize,
    /// Elements of a value head.
    pub value: usize,
    /// Whether neighbors rotate together, instead of elements of the first and second half.
    pub interleaved: bool,
}

impl LatentDims {
    /// Elements of a head in packed rows.
    pub fn head_dim(&self) -> usize {
        self.query().max(self.value)
    }

    /// Elements of a query head.
    pub fn query(&self) -> usize {
        self.fixed + self.rotating
    }

    /// The place among the rotating elements from which the one at `index` of packed rows comes.
    pub fn rotating_source(&self, index: usize) -> usize {
        let half = self.rotating / 2;
        if self.interleaved { 2 * (index % half) + index / half } else { index }
    }

    fn roles(&self, names: [&'static str; 3]) -> [Role; 3] {
        let heads = self.rows * self.heads;
        let lens = [heads * self.query(), self.rows * self.rotating, heads * (self.fixed + self.value)];
        [0, 1, 2].map(|i| Role::value(names[i], lens[i]))
    }

    fn packed(&self, name: &'static str) -> Role {
        Role::value(name, 3 * self.rows * self.heads * self.head_dim())
    }

    fn attended(&self, name: &'static str) -> Role {
        Role::value(name, self.rows * self.heads * self.head_dim())
    }

    fn values(&self, name: &'static str) -> Role {
        Role::value(name, self.rows * self.heads * self.value)
    }
}

/// Operations of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latent {
    /// Packs the query heads (fixed elements, then rotating), the rotating elements that all key heads share, and what is
    /// different per key head (fixed elements, then the value).
    Pack(LatentDims),
    /// The gradients of the three; that of shared elements is the sum over heads, in their order.
    PackBackward(LatentDims),
    /// Drops the zeros after each head of the output of attention.
    Unpack(LatentDims),
    /// Puts zeros after each head of a gradient.
    UnpackBackward(LatentDims),
}

impl Latent {
    pub(super) fn describe(&self) -> Description {
        match self {
            Latent::Pack(dims) => Description::new("latent_pack")
                .read(dims.roles(["q", "k_rotating", "kv"]))
                .write([dims.packed("qkv")]),
            Latent::PackBackward(dims) => Description::new("latent_pack_backward")
                .read([dims.packed("dqkv")])
                .write(dims.roles(["dq", "dk_rotating", "dkv"]))
                .flops(dims.rows * dims.heads * dims.rotating),
            Latent::Unpack(dims) => Description::new("latent_unpack")
                .read([dims.attended("x").touching(dims.values("y").len)])
                .write([dims.values("y")]),
            Latent::UnpackBackward(dims) => Description::new("latent_unpack_backward")
                .read([dims.values("dy")])
                .write([dims.attended("dx")]),
        }
    }

    pub(super) fn derive(&self, b: &mut Backward<'_>, node: &Node, output: usize) {
        let Some(dy) = b.take(output) else { return };
        let reads = node.main().reads.clone();
        let op = match *self {
            Latent::Pack(dims) => Latent::PackBackward(dims),
            Latent::Unpack(dims) => Latent::UnpackBackward(dims),
            Latent::PackBackward(_) | Latent::UnpackBackward(_) => unreachable!("backward has no derivative"),
        };
        let inputs = reads.iter().map(|read| read.local().expect("heads are values"));
        let places: Vec<(usize, usize)> = inputs.map(|input| (input, b.temporary(input))).collect();
        let writes = places.iter().map(|(_, place)| (b.draft.whole(*place), false)).collect();
        b.draft.call(Op::Latent(op), vec![b.draft.whole(dy)], writes);
        places.into_iter().for_each(|(input, place)| b.put(input, place));
    }
}

impl Builder<'_> {
    /// Packs query heads, the shared rotating elements of keys, and keys with values for attention.
    ///
    /// # Errors
    /// If a width does not fit.
    pub fn pack_latent(
        &mut self,
        dims: LatentDims,
        [q, k_rotating, kv]: [Tensor; 3],
    ) -> Result<Tensor, Error> {
        let dims = LatentDims { rows: self.row_count(), ..dims };
        self.check("latent_pack", q, dims.heads * dims.query())?;
        self.check("latent_pack", k_rotating, dims.rotating)?;
        self.check("latent_pack", kv, dims.heads * (dims.fixed + dims.value))?;
        let y = self.rows(3 * dims.heads * dims.head_dim());
        let reads = [q, k_rotating, kv].iter().map(|read| self.whole(*read)).collect();
        let write = (self.whole(y), false);
        self.node(vec![Call::new(Op::Latent(Latent::Pack(dims)), reads, [write])], None);
        Ok(y)
    }

    /// Keeps the elements of value heads in the output of attention over packed heads.
    ///
    /// # Errors
    /// If the width does not fit.
    pub fn unpack_latent(&mut self, dims: LatentDims, x: Tensor) -> Result<Tensor, Error> {
        let dims = LatentDims { rows: self.row_count(), ..dims };
        self.check("latent_unpack", x, dims.heads * dims.head_dim())?;
        if dims.value == dims.head_dim() {
            return Ok(x);
        }
        let y = self.rows(dims.heads * dims.value);
        let (read, write) = (self.whole(x), (self.whole(y), false));
        self.node(vec![Call::new(Op::Latent(Latent::Unpack(dims)), vec![read], [write])], None);
        Ok(y)
    }
}
