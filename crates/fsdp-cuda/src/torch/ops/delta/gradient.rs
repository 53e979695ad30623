//! Backward of the gated delta rule: the states before all chunks again, then the chunks from the last to the first.

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::Operands;
use fsdp_nn::op::DeltaDims;
use tch::{Kind, Tensor};

use super::{Chunk, Heads, Part, by_head, gate_rows, rows, value_rows};
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::ops::int;
use crate::torch::storage::TorchStorage;

/// The gradients of a part: of queries, keys, values, `beta` and the sums of `g` within chunks, per value head.
struct Gradients {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
}

impl<D: TorchStorage> Torch<D> {
    pub(super) fn scan_backward(
        &self,
        dims: DeltaDims,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let batch = operands.batch;
        let ([qkv, gates, a_log, dt_bias, dy], [dqkv, dgates, states], mut more) = operands.split();
        let (kind, heads) = (arithmetic(qkv.buffer.dtype())?, [int(dims.value_heads)]);
        let [a_log, dt_bias] = [self.view(a_log, &heads)?, self.view(dt_bias, &heads)?];
        let params = [a_log.f_to_kind(kind)?, dt_bias.f_to_kind(kind)?];
        let (qkv, gates) = (self.view(qkv, &rows(dims))?, self.view(gates, &gate_rows(dims))?);
        let dy = self.view(dy, &value_rows(dims))?;
        let dqkv = self.view_mut(dqkv.slice, &rows(dims))?;
        let dgates = self.view_mut(dgates.slice, &gate_rows(dims))?;
        let states = self.view_mut(states.slice, &[dims.states().into_iter().product::<usize>()].map(int))?;
        let mut rates = Tensor::f_zeros([int(dims.value_heads)], (kind, qkv.device()))?;
        for part in Part::all((dims.batch, dims.seq), dims.packed, batch) {
            let heads = Heads::new(dims, &part, [&qkv, &gates], &params, kind)?;
            let dy = by_head(&part.of(&dy)?.f_to_kind(kind)?, dims.value_heads)?;
            let gradients = backward(&heads, &dy, &states)?;
            let rate = gradients.g.f_mul(&heads.g)?.f_sum_dim_intlist([0_i64, 2].as_slice(), false, None)?;
            rates.f_add_(&rate).done()?;
            heads.store(gradients, [&part.of(&dqkv)?, &part.of(&dgates)?])?;
        }
        let Some(da_log) = more.next() else { return Ok(()) };
        self.target(da_log, &[int(dims.value_heads)])?.put(&rates)
    }
}

/// Computes the gradients of a part. The states before its chunks, but the first, are in `scratch`.
fn backward(heads: &Heads, dy: &Tensor, scratch: &Tensor) -> Result<Gradients, Failure> {
    let mut states = vec![heads.states()?];
    let len = int(states[0].numel());
    for (index, (start, rows)) in heads.chunks().take(heads.chunks().count() - 1).enumerate() {
        let before = states.last().expect("there is a first");
        let mut state = scratch.f_narrow(0, int(index) * len, len)?.f_view_as(before)?;
        state.f_copy_(&Chunk::new(heads, start, rows, before)?.next(before)?)?;
        states.push(state);
    }
    let all = Gradients {
        q: heads.q.f_zeros_like()?,
        k: heads.k.f_zeros_like()?,
        v: heads.v.f_zeros_like()?,
        beta: heads.beta.f_zeros_like()?,
        g: heads.g.f_zeros_like()?,
    };
    let mut dstate = heads.states()?;
    for ((start, len), state) in heads.chunks().rev().zip(states.iter().rev()) {
        let chunk = Chunk::new(heads, start, len, state)?;
        let (of_chunk, before) = chunk.gradients(state, &dy.f_narrow(2, start, len)?, &dstate)?;
        dstate = before;
        let parts = [
            (&all.q, of_chunk.q),
            (&all.k, of_chunk.k),
            (&all.v, of_chunk.v),
            (&all.beta, of_chunk.beta),
            (&all.g, of_chunk.g),
        ];
        for (all, part) in parts {
            all.f_narrow(2, start, len)?.f_copy_(&part)?;
        }
    }
    Ok(all)
}

/// Sums the products of two matrices over the elements of rows.
fn along(a: &Tensor, b: &Tensor) -> Result<Tensor, Failure> {
    Ok(a.f_mul(b)?.f_sum_dim_intlist(-1_i64, false, None)?)
}

impl Chunk {
    /// The gradients of a chunk and of the state before it, from those of its output and of the state after it.
    fn gradients(
        &self,
        state: &Tensor,
        dy: &Tensor,
        dstate: &Tensor,
    ) -> Result<(Gradients, Tensor), Failure> {
        let t = |matrix: &Tensor| matrix.f_transpose(-2, -1);
        let late = self.k.f_mul(&self.to_end)?;
        let dnew = t(&self.weights)?.f_matmul(dy)?.f_add(&late.f_matmul(dstate)?)?;
        let drest = t(&self.system)?.f_linalg_solve_triangular(&dnew, true, true, true)?;
        let dweights = dy.f_matmul(&t(&self.new)?)?.f_mul(&self.between)?;
        let dsystem = drest.f_matmul(&t(&self.new)?)?.f_neg()?.f_mul(&self.between)?.f_tril(-1)?;
        let beta = along(&drest, &self.difference)?.f_add(&along(&dsystem, &self.kk)?)?;
        let v = drest.f_mul(&self.beta)?;
        let (dread, dy) = (v.f_mul(&self.from_start)?.f_neg()?, dy.f_mul(&self.from_start)?);
        let dlate = self.new.f_matmul(&t(dstate)?)?.f_mul(&self.to_end)?;
        let dfirst = dy.f_matmul(&t(state)?)?;
        let (dqk, dkk) = (&dweights, dsystem.f_mul(&self.beta)?);
        let q = dfirst.f_add(&dqk.f_matmul(&self.k)?)?;
        let k = dlate
            .f_add(&dread.f_matmul(&t(state)?)?)?
            .f_add(&t(dqk)?.f_matmul(&self.q)?)?
            .f_add(&dkk.f_matmul(&self.k)?)?
            .f_add(&t(&dkk)?.f_matmul(&self.k)?)?;
        let exponents = dqk.f_mul(&self.qk)?.f_add(&dkk.f_mul(&self.kk)?)?;
        let of_late = along(&dlate, &self.k)?;
        let sums = exponents
            .f_sum_dim_intlist(-1_i64, false, None)?
            .f_sub(&exponents.f_sum_dim_intlist(-2_i64, false, None)?)?
            .f_add(&along(&dfirst, &self.q)?)?
            .f_add(&along(&dread, &self.read)?)?
            .f_sub(&of_late)?;
        let of_state = along(state, dstate)?.f_sum_dim_intlist(-1_i64, true, None)?;
        let of_whole = of_state.f_mul(&self.whole.f_squeeze_dim(-1)?)?;
        let of_last = of_late.f_sum_dim_intlist(-1_i64, true, None)?.f_add(&of_whole)?;
        sums.f_narrow(-1, sums.size()[2] - 1, 1)?.f_add_(&of_last).done()?;
        let g = sums.f_flip([-1_i64])?.f_cumsum(-1, None::<Kind>)?.f_flip([-1_i64])?;
        let before = dstate
            .f_mul(&self.whole)?
            .f_add(&t(&self.q)?.f_matmul(&dy)?)?
            .f_add(&t(&self.k)?.f_matmul(&dread)?)?;
        Ok((Gradients { q, k, v, beta, g }, before))
    }
}

impl Heads {
    /// Writes gradients to the rows and gates of a part.
    fn store(&self, gradients: Gradients, [rows, gates]: [&Tensor; 2]) -> Result<(), Failure> {
        let DeltaDims { key_heads, value_heads, key_dim, .. } = self.dims;
        let keys = int(key_heads * key_dim);
        let scale = 1.0 / (key_dim as f64).sqrt();
        let sections = [
            (self.of_head(&gradients.q, &self.q, (&self.inverse_norms[0], scale))?, 0, key_heads),
            (self.of_head(&gradients.k, &self.k, (&self.inverse_norms[1], 1.0))?, keys, key_heads),
            (gradients.v, 2 * keys, value_heads),
        ];
        for (gradient, start, heads) in sections {
            let width = gradient.size()[3] * int(heads);
            by_head(&rows.f_narrow(2, start, width)?, heads)?.f_copy_(&gradient)?;
        }
        let rest = self.beta.f_neg()?.f_add_scalar(1.0)?;
        let dlogits = gradients.beta.f_mul(&self.beta)?.f_mul(&rest)?;
        let da = gradients.g.f_mul(&self.slope)?;
        let heads = int(value_heads);
        gates.f_narrow(2, 0, heads)?.f_copy_(&dlogits.f_transpose(1, 2)?)?;
        gates.f_narrow(2, heads, heads)?.f_copy_(&da.f_transpose(1, 2)?)?;
        Ok(())
    }

    /// The gradient of a head that was divided by its norm, and multiplied by a scale, from those of the value heads that use
    /// it.
    fn of_head(
        &self,
        gradient: &Tensor,
        head: &Tensor,
        (inverse_norm, scale): (&Tensor, f64),
    ) -> Result<Tensor, Failure> {
        let grouped = [int(self.dims.key_heads), int(self.dims.group())];
        let gradient = gradient.f_unflatten(1, grouped)?.f_sum_dim_intlist(2_i64, false, None)?;
        let head = head.f_unflatten(1, grouped)?.f_select(2, 0)?;
        let along = along(&gradient, &head)?.f_unsqueeze(-1)?.f_mul_scalar(1.0 / (scale * scale))?;
        Ok(gradient.f_sub(&head.f_mul(&along)?)?.f_mul(inverse_norm)?.f_mul_scalar(scale)?)
    }
}
