//! Linear attention by the gated delta rule, and short convolutions: document by document where samples hold several, else
//! all samples together.

mod chunk;
mod convolution;
mod gradient;

use std::ops::Range;

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::{BatchFacts, Operands};
use fsdp_nn::op::{CHUNK, Delta, DeltaDims, NORM_EPS};
use tch::{Kind, Tensor};

use self::chunk::Chunk;
use super::size::int;
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn delta(
        &self,
        op: &Delta,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let batch = operands.batch;
        match *op {
            Delta::Convolve(dims) => self.convolve(dims, operands),
            Delta::ConvolveBackward { dims, .. } => self.convolve_backward(dims, operands),
            Delta::Scan(dims) => {
                let ([qkv, gates, a_log, dt_bias], [y], _) = operands.split();
                let (kind, heads) = (arithmetic(qkv.buffer.dtype())?, [int(dims.value_heads)]);
                let [a_log, dt_bias] = [self.view(a_log, &heads)?, self.view(dt_bias, &heads)?];
                let params = [a_log.f_to_kind(kind)?, dt_bias.f_to_kind(kind)?];
                let (qkv, gates) = (self.view(qkv, &rows(dims))?, self.view(gates, &gate_rows(dims))?);
                let y = self.view_mut(y.slice, &value_rows(dims))?;
                for part in Part::all((dims.batch, dims.seq), dims.packed, batch) {
                    let heads = Heads::new(dims, &part, [&qkv, &gates], &params, kind)?;
                    forward(&heads, &by_head(&part.of(&y)?, dims.value_heads)?)?;
                }
                Ok(())
            }
            Delta::ScanBackward { dims, .. } => self.scan_backward(dims, operands),
        }
    }
}

/// Rows whose documents begin at their first: one document, or samples that are one each.
pub(super) struct Part {
    rows: Range<usize>,
    samples: usize,
}

impl Part {
    fn all((batch, seq): (usize, usize), packed: bool, facts: BatchFacts<'_>) -> Vec<Self> {
        if packed {
            return facts.documents.iter().map(|rows| Self { rows: rows.clone(), samples: 1 }).collect();
        }
        vec![Self { rows: 0..batch * seq, samples: batch }]
    }

    /// These rows of a matrix, as samples x positions x columns.
    fn of(&self, all: &Tensor) -> Result<Tensor, Failure> {
        let rows = all.f_narrow(0, int(self.rows.start), int(self.rows.len()))?;
        Ok(rows.f_view([int(self.samples), -1, all.size()[1]])?)
    }
}

fn rows(dims: DeltaDims) -> [i64; 2] {
    [dims.rows(), dims.width()].map(int)
}

fn gate_rows(dims: DeltaDims) -> [i64; 2] {
    [dims.rows(), 2 * dims.value_heads].map(int)
}

fn value_rows(dims: DeltaDims) -> [i64; 2] {
    [dims.rows(), dims.value_heads * dims.value_dim].map(int)
}

/// Samples x heads x positions x elements, from samples x positions x columns. Columns may be a part of longer rows.
fn by_head(columns: &Tensor, heads: usize) -> Result<Tensor, Failure> {
    let sizes = columns.size();
    let width = sizes[2] / int(heads);
    Ok(columns.f_unflatten(2, [int(heads), width])?.f_transpose(1, 2)?)
}

/// The heads of a part, in the arithmetic type. All but the norms have one entry per value head.
pub(super) struct Heads {
    dims: DeltaDims,
    /// Divided by their norms, and by the root of their number of elements.
    q: Tensor,
    /// Divided by their norms.
    k: Tensor,
    v: Tensor,
    /// One over the norms of queries and of keys.
    inverse_norms: [Tensor; 2],
    beta: Tensor,
    /// The logarithm of the decay, and its derivative by `a`.
    g: Tensor,
    slope: Tensor,
}

impl Heads {
    fn new(
        dims: DeltaDims,
        part: &Part,
        [qkv, gates]: [&Tensor; 2],
        [a_log, dt_bias]: &[Tensor; 2],
        kind: Kind,
    ) -> Result<Self, Failure> {
        let [keys, values] = [dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim].map(int);
        let qkv = part.of(qkv)?.f_to_kind(kind)?;
        let section = |start, width, heads| by_head(&qkv.f_narrow(2, start, width)?, heads);
        let (q, k) = (section(0, keys, dims.key_heads)?, section(keys, keys, dims.key_heads)?);
        let v = section(2 * keys, values, dims.value_heads)?;
        let inverse_norm = |head: &Tensor| -> Result<Tensor, Failure> {
            let squares = head.f_square()?.f_sum_dim_intlist(-1_i64, true, None)?;
            Ok(squares.f_add_scalar(NORM_EPS)?.f_rsqrt()?)
        };
        let inverse_norms = [inverse_norm(&q)?, inverse_norm(&k)?];
        let repeated = |head: Tensor| head.f_repeat_interleave_self_int(int(dims.group()), 1, None::<i64>);
        let q = repeated(q.f_mul(&inverse_norms[0])?.f_mul_scalar(1.0 / (dims.key_dim as f64).sqrt())?)?;
        let k = repeated(k.f_mul(&inverse_norms[1])?)?;
        let gates = part.of(gates)?.f_to_kind(kind)?;
        let [logits, a] = [0, 1].map(|half| -> Result<Tensor, Failure> {
            let heads = int(dims.value_heads);
            Ok(gates.f_narrow(2, half * heads, heads)?.f_transpose(1, 2)?)
        });
        let a = a?.f_add(&dt_bias.f_unsqueeze(-1)?)?;
        let rate = a_log.f_exp()?.f_neg()?.f_unsqueeze(-1)?;
        let (g, slope) = (a.f_softplus()?.f_mul(&rate)?, a.f_sigmoid()?.f_mul(&rate)?);
        Ok(Self { dims, q, k, v, inverse_norms, beta: logits?.f_sigmoid()?, g, slope })
    }

    /// The first positions and lengths of the chunks.
    fn chunks(&self) -> impl DoubleEndedIterator<Item = (i64, i64)> + use<> {
        let (chunk, end) = (int(CHUNK), self.q.size()[2]);
        (0..(end + chunk - 1) / chunk).map(move |index| (index * chunk, chunk.min(end - index * chunk)))
    }

    /// States of zeros.
    fn states(&self) -> Result<Tensor, Failure> {
        let [samples, heads, ..] = self.q.size()[..] else { unreachable!("heads have four dimensions") };
        let sizes = [samples, heads, int(self.dims.key_dim), int(self.dims.value_dim)];
        Ok(Tensor::f_zeros(sizes, (self.q.f_kind()?, self.q.device()))?)
    }
}

/// Writes the output of a part.
fn forward(heads: &Heads, y: &Tensor) -> Result<(), Failure> {
    let mut state = heads.states()?;
    for (start, len) in heads.chunks() {
        let chunk = Chunk::new(heads, start, len, &state)?;
        let read = chunk.q.f_matmul(&state)?.f_mul(&chunk.from_start)?;
        let output = read.f_add(&chunk.weights.f_matmul(&chunk.new)?)?;
        y.f_narrow(2, start, len)?.f_copy_(&output)?;
        state = chunk.next(&state)?;
    }
    Ok(())
}
