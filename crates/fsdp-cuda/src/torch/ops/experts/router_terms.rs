//! What routers add to the loss: their loads, and the derivatives of their terms.

use std::ops::Range;

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::BatchFacts;
use fsdp_nn::op::{RouterTerms, Routing, Scoring};
use tch::{Device, Kind, Tensor};

use super::In;
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::ops::int;
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    /// The load of a mixture, from its logits, the probabilities of all experts, and 1 for each of a row's experts.
    pub(super) fn load(
        &self,
        terms: RouterTerms,
        routing: Routing,
        facts: BatchFacts<'_>,
        (logits, probabilities, routes): (In<'_, D>, &Tensor, &Tensor),
    ) -> Result<Tensor, Failure> {
        let rows = row_mask(routing, facts, probabilities.device())?.f_to_kind(Kind::Double)?;
        let both = Tensor::f_cat(&[routes, probabilities], 1)?;
        let mut parts = vec![both.f_mul(&rows)?.f_sum_dim_intlist(0_i64, false, None)?];
        if terms.z_loss_at().is_some() {
            let squares = self.log_sum_exp(routing, logits)?.f_to_kind(Kind::Double)?.f_square()?;
            let sum = squares.f_mul(&rows)?.f_sum_dim_intlist(0_i64, false, None)?;
            parts.push(sum.f_mul_scalar(terms.z_scale(facts))?);
        }
        if terms.sequence_at().is_some() {
            let mut loss = Tensor::f_zeros([1], (Kind::Double, rows.device()))?;
            for (rows, scale) in terms.sequences(facts, routing) {
                let sum = |numbers: &Tensor| column_sums(numbers, &rows);
                let product = sum(routes)?.f_mul(&sum(probabilities)?)?.f_sum(None)?;
                loss = loss.f_add(&product.f_mul_scalar(scale)?)?;
            }
            parts.push(loss);
        }
        Ok(Tensor::f_cat(&parts, 0)?)
    }

    /// Routes and probabilities of each expert, summed over all mixtures: 2 x experts.
    pub(super) fn sums(&self, terms: RouterTerms, loads: In<'_, D>) -> Result<Tensor, Failure> {
        let loads = self.view(loads, &[int(terms.layers), int(terms.load_len())])?;
        let sums = loads.f_narrow(1, 0, int(2 * terms.experts))?.f_sum_dim_intlist(0_i64, false, None)?;
        Ok(sums.f_view([2, int(terms.experts)])?)
    }

    /// The derivatives of the balancing losses with respect to the probabilities of rows, if there are any: rows x experts.
    pub(super) fn slopes(
        &self,
        terms: RouterTerms,
        routing: Routing,
        facts: BatchFacts<'_>,
        (order, loads): (&Tensor, Option<In<'_, D>>),
    ) -> Result<Option<Tensor>, Failure> {
        if loads.is_none() && terms.sequence == 0.0 {
            return Ok(None);
        }
        let routes = one_hot(order, routing.experts)?;
        let mut slopes = routes.f_zeros_like()?;
        if terms.sequence != 0.0 {
            for (rows, scale) in terms.sequences(facts, routing) {
                let counts = column_sums(&routes, &rows)?;
                let mut part = slopes.f_narrow(0, int(rows.start), int(rows.len()))?;
                part.f_copy_(&counts.f_mul_scalar(scale * terms.loss_scale)?)?;
            }
        }
        if let Some(loads) = loads {
            let counts = self.sums(terms, loads)?.f_select(0, 0)?;
            slopes = slopes.f_add(&counts.f_mul_scalar(terms.balance_slope(facts))?)?;
        }
        Ok(Some(slopes.f_mul(&row_mask(routing, facts, slopes.device())?)?))
    }

    /// The gradient of the z-loss to logits.
    pub(super) fn z_gradient(
        &self,
        terms: RouterTerms,
        routing: Routing,
        facts: BatchFacts<'_>,
        logits: In<'_, D>,
    ) -> Result<Tensor, Failure> {
        let normalizer = self.log_sum_exp(routing, logits)?;
        let mask = row_mask(routing, facts, normalizer.device())?.f_to_kind(normalizer.f_kind()?)?;
        let slopes = normalizer.f_mul(&mask)?.f_mul_scalar(terms.z_slope(facts))?;
        Ok(self.scores(routing, Scoring::Softmax, logits)?.f_mul(&slopes)?)
    }

    /// The logarithms of the sums of the exponentials of logits, in the arithmetic type: rows x 1.
    fn log_sum_exp(&self, routing: Routing, logits: In<'_, D>) -> Result<Tensor, Failure> {
        let kind = arithmetic(logits.buffer.dtype())?;
        let logits = self.view(logits, &[int(routing.rows), int(routing.experts)])?;
        Ok(logits.f_to_kind(kind)?.f_logsumexp(1_i64, true)?)
    }
}

/// 1 for each of a row's experts, 0 for the others: rows x experts, in double precision.
pub(super) fn one_hot(order: &Tensor, experts: usize) -> Result<Tensor, Failure> {
    let zeros = Tensor::f_zeros([order.size()[0], int(experts)], (Kind::Double, order.device()))?;
    Ok(zeros.f_scatter_value(1, order, 1.0)?)
}

/// The sums of the columns of some rows.
fn column_sums(numbers: &Tensor, rows: &Range<usize>) -> Result<Tensor, Failure> {
    let rows = numbers.f_narrow(0, int(rows.start), int(rows.len()))?;
    Ok(rows.f_sum_dim_intlist(0_i64, false, None)?)
}

/// 1 for each counted row, 0 for the others: rows x 1.
fn row_mask(routing: Routing, facts: BatchFacts<'_>, device: Device) -> Result<Tensor, Failure> {
    let rows: Vec<f32> = facts.counted(routing.rows).map(|counts| f32::from(u8::from(counts))).collect();
    Ok(Tensor::f_from_slice(&rows)?.f_view([-1, 1])?.f_to_device(device)?)
}
