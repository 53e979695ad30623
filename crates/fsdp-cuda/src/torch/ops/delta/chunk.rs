//! What the rule computes of a chunk of tokens, as the host's kernels do.

use tch::{Kind, Tensor};

use super::Heads;
use crate::torch::error::Failure;

/// A chunk of all heads. Decays and gates are columns.
pub(super) struct Chunk {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) beta: Tensor,
    /// Decay from the first token to each, from each to the last, and over all.
    pub(super) from_start: Tensor,
    pub(super) to_end: Tensor,
    pub(super) whole: Tensor,
    /// Decay between tokens, zero above the diagonal.
    pub(super) between: Tensor,
    /// Products of queries and keys, and of keys.
    pub(super) qk: Tensor,
    pub(super) kk: Tensor,
    /// `qk` with decays.
    pub(super) weights: Tensor,
    /// The matrix below whose diagonal are the parts of later tokens that earlier ones correct.
    pub(super) system: Tensor,
    /// What keys read from the state, what they are to be corrected by (before `beta`), and the corrections.
    pub(super) read: Tensor,
    pub(super) difference: Tensor,
    pub(super) new: Tensor,
}

impl Chunk {
    pub(super) fn new(heads: &Heads, start: i64, len: i64, state: &Tensor) -> Result<Self, Failure> {
        let part = |all: &Tensor| all.f_narrow(2, start, len);
        let (q, k, v) = (part(&heads.q)?, part(&heads.k)?, part(&heads.v)?);
        let beta = part(&heads.beta)?.f_unsqueeze(-1)?;
        let sums = part(&heads.g)?.f_cumsum(-1, None::<Kind>)?;
        let last = sums.f_narrow(-1, len - 1, 1)?;
        let (rows, columns) = (sums.f_unsqueeze(-1)?, sums.f_unsqueeze(-2)?);
        let later = Tensor::f_ones([len, len], (Kind::Bool, q.device()))?.f_triu(1)?;
        let between = rows.f_sub(&columns)?.f_masked_fill(&later, f64::NEG_INFINITY)?.f_exp()?;
        let (from_start, to_end) = (rows.f_exp()?, last.f_sub(&sums)?.f_exp()?.f_unsqueeze(-1)?);
        let keys = k.f_transpose(-2, -1)?;
        let (qk, kk) = (q.f_matmul(&keys)?, k.f_matmul(&keys)?);
        let system = kk.f_mul(&between)?.f_mul(&beta)?.f_tril(-1)?;
        let read = k.f_matmul(state)?;
        let difference = v.f_sub(&read.f_mul(&from_start)?)?;
        let new = system.f_linalg_solve_triangular(&difference.f_mul(&beta)?, false, true, true)?;
        let (weights, whole) = (qk.f_mul(&between)?, last.f_exp()?.f_unsqueeze(-1)?);
        Ok(Self {
            q,
            k,
            beta,
            from_start,
            to_end,
            whole,
            between,
            qk,
            kk,
            weights,
            system,
            read,
            difference,
            new,
        })
    }

    /// The state after the chunk.
    pub(super) fn next(&self, state: &Tensor) -> Result<Tensor, Failure> {
        let late = self.k.f_mul(&self.to_end)?.f_transpose(-2, -1)?;
        Ok(state.f_mul(&self.whole)?.f_add(&late.f_matmul(&self.new)?)?)
    }
}
