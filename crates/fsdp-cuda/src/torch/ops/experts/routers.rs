//! Routers: which experts a row is sent to, and the gradients of their logits.

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::Operands;
use fsdp_nn::op::{Experts, Gating, Groups, Routing, SCORES_EPS, Scoring};
use tch::{Kind, Tensor};

use super::router_terms::one_hot;
use super::{In, To};
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::ops::int;
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(super) fn routers(&self, op: &Experts, operands: Operands<'_, '_, D::Buffer>) -> Result<(), Failure> {
        let reads = operands.reads;
        match *op {
            Experts::Route { routing, gating, load } => {
                let (facts, bias) = (operands.batch, reads.get(1).copied());
                let ([logits], [weights, routes], mut write) = operands.split();
                let (scores, order) = self.aten_route((routing, gating), logits, bias, weights, routes)?;
                let Some((terms, write)) = load.zip(write.next()) else { return Ok(()) };
                let probabilities = probabilities(gating.scoring, scores)?.f_to_kind(Kind::Double)?;
                let routes = one_hot(&order, routing.experts)?;
                let load = self.load(terms, routing, facts, (logits, &probabilities, &routes))?;
                self.put(write, &load)
            }
            Experts::RouteBackward { routing, gating, terms } => {
                let (facts, loads) = (operands.batch, reads.get(3).copied());
                let (reads, [dlogits], _) = operands.split();
                let sizes = [int(routing.rows), int(routing.top)];
                let order = self.view(reads[1], &sizes)?.f_to_kind(Kind::Int64)?;
                let slopes = match terms {
                    None => None,
                    Some(terms) => self.slopes(terms, routing, facts, (&order, loads))?,
                };
                let gradients = self.aten_route_backward((routing, gating), (order, slopes), reads)?;
                let gradients = match terms.filter(|terms| terms.z_loss != 0.0) {
                    None => gradients,
                    Some(terms) => gradients.f_add(&self.z_gradient(terms, routing, facts, reads[0])?)?,
                };
                self.put(dlogits, &gradients)
            }
            Experts::BalanceLoss { terms } => {
                let facts = operands.batch;
                let ([loads], [loss], _) = operands.split();
                let product = self.sums(terms, loads)?.f_prod_dim_int(0, false, None)?;
                let sum = product.f_sum_dim_intlist(0_i64, true, None)?;
                self.put(loss, &sum.f_mul_scalar(terms.balance_scale(facts))?)
            }
            _ => unreachable!("the caller asks for routers only"),
        }
    }

    /// The scores of all experts, in the arithmetic type.
    pub(super) fn scores(
        &self,
        routing: Routing,
        scoring: Scoring,
        logits: In<'_, D>,
    ) -> Result<Tensor, Failure> {
        let kind = arithmetic(logits.buffer.dtype())?;
        let logits = self.view(logits, &[int(routing.rows), int(routing.experts)])?;
        Ok(match scoring {
            Scoring::Softmax => logits.f_softmax(-1, kind)?,
            Scoring::Sigmoid => logits.f_to_kind(kind)?.f_sigmoid()?,
        })
    }

    /// Computes weights and routes; returns all scores, and the chosen experts of each row.
    fn aten_route(
        &self,
        (routing, gating): (Routing, Gating),
        logits: In<'_, D>,
        bias: Option<In<'_, D>>,
        weights: To<'_, D>,
        routes: To<'_, D>,
    ) -> Result<(Tensor, Tensor), Failure> {
        let scores = self.scores(routing, gating.scoring, logits)?;
        let biased = match bias {
            None => scores.shallow_clone(),
            Some(bias) => scores.f_add(&*self.view(bias, &[1, int(routing.experts)])?)?,
        };
        let biased = if gating.groups.restrict() { of_best_groups(gating.groups, &biased)? } else { biased };
        let (_, order) = biased.f_sort_stable(true, -1, true)?;
        let order = order.f_narrow(1, 0, int(routing.top))?;
        self.put(weights, &weigh(gating, scores.f_gather(1, &order, false)?)?)?;
        self.put(routes, &order)?;
        Ok((scores, order))
    }

    fn aten_route_backward(
        &self,
        (routing, gating): (Routing, Gating),
        (order, slopes): (Tensor, Option<Tensor>),
        [logits, _, dweights]: [In<'_, D>; 3],
    ) -> Result<Tensor, Failure> {
        let scores = self.scores(routing, gating.scoring, logits)?;
        let chosen = scores.f_gather(1, &order, false)?;
        let dweights = self.view(dweights, &order.size())?.f_to_kind(chosen.f_kind()?)?;
        let slopes = slopes.map(|slopes| slopes.f_to_kind(scores.f_kind()?)).transpose()?;
        let chosen = (&order, chosen, dweights);
        match gating.scoring {
            Scoring::Softmax => softmax_gradients(gating, &scores, chosen, slopes),
            Scoring::Sigmoid => sigmoid_gradients(gating, &scores, chosen, slopes),
        }
    }
}

/// The gradient of the logits, from those of the chosen experts' weights (their numbers, scores and gradients), and the
/// derivatives of the balancing loss with respect to probabilities.
fn softmax_gradients(
    gating: Gating,
    probabilities: &Tensor,
    (order, chosen, dweights): (&Tensor, Tensor, Tensor),
    slopes: Option<Tensor>,
) -> Result<Tensor, Failure> {
    let chosen = weigh(gating, chosen)?;
    let mean = row_sums(&chosen.f_mul(&dweights)?)?;
    let gradient = chosen.f_mul(&dweights.f_sub(&mean)?)?;
    let others = match gating.normalized {
        true => probabilities.f_zeros_like()?,
        false => probabilities.f_mul(&mean)?.f_neg()?,
    };
    let gradients = others.f_scatter(1, order, &gradient)?;
    let Some(slopes) = slopes else { return Ok(gradients) };
    let mean = row_sums(&probabilities.f_mul(&slopes)?)?;
    Ok(gradients.f_add(&probabilities.f_mul(&slopes.f_sub(&mean)?)?)?)
}

/// As [`softmax_gradients`], for logistic scores.
fn sigmoid_gradients(
    gating: Gating,
    scores: &Tensor,
    (order, chosen, dweights): (&Tensor, Tensor, Tensor),
    slopes: Option<Tensor>,
) -> Result<Tensor, Failure> {
    let all = match slopes {
        None => scores.f_zeros_like()?,
        Some(slopes) => {
            let sum = row_sums(scores)?.f_add_scalar(SCORES_EPS)?;
            let mean = row_sums(&scores.f_mul(&slopes)?)?.f_div(&sum)?;
            slopes.f_sub(&mean)?.f_div(&sum)?
        }
    };
    let gradient = match gating.normalized {
        false => dweights,
        true => {
            let sum = row_sums(&chosen)?.f_add_scalar(SCORES_EPS)?;
            let mean = row_sums(&chosen.f_mul(&dweights)?)?.f_div(&sum)?;
            dweights.f_sub(&mean)?.f_div(&sum)?
        }
    };
    let slope = scores.f_mul(&scores.f_neg()?.f_add_scalar(1.0)?)?;
    Ok(all.f_scatter_add(1, order, &gradient)?.f_mul(&slope)?)
}

/// Scores, but negative infinity for experts that are not in the best groups.
fn of_best_groups(groups: Groups, scores: &Tensor) -> Result<Tensor, Failure> {
    let grouped = scores.f_reshape([scores.size()[0], int(groups.count), -1])?;
    let (members, _) = grouped.f_sort_stable(true, -1, true)?;
    let best_two = members.f_narrow(2, 0, members.size()[2].min(2))?;
    let (_, order) = best_two.f_sum_dim_intlist(2_i64, false, None)?.f_sort_stable(true, -1, true)?;
    let order = order.f_narrow(1, int(groups.top), int(groups.count - groups.top))?;
    let left_out = order.f_zeros_like()?.f_to_kind(Kind::Bool)?.f_logical_not()?;
    let mask = Tensor::f_zeros([scores.size()[0], int(groups.count)], (Kind::Bool, scores.device()))?;
    let mask = mask.f_scatter(1, &order, &left_out)?.f_unsqueeze(2)?;
    Ok(grouped.f_masked_fill(&mask, f64::NEG_INFINITY)?.f_reshape(scores.size())?)
}

/// The weights of the chosen experts.
fn weigh(gating: Gating, chosen: Tensor) -> Result<Tensor, Failure> {
    match (gating.normalized, gating.scoring) {
        (false, _) => Ok(chosen),
        (true, Scoring::Softmax) => shares(&chosen),
        (true, Scoring::Sigmoid) => Ok(chosen.f_div(&row_sums(&chosen)?.f_add_scalar(SCORES_EPS)?)?),
    }
}

/// Scores as numbers that sum to one, for the balancing loss.
fn probabilities(scoring: Scoring, scores: Tensor) -> Result<Tensor, Failure> {
    match scoring {
        Scoring::Softmax => Ok(scores),
        Scoring::Sigmoid => Ok(scores.f_div(&row_sums(&scores)?.f_add_scalar(SCORES_EPS)?)?),
    }
}

/// The sum of each row.
fn row_sums(numbers: &Tensor) -> Result<Tensor, Failure> {
    Ok(numbers.f_sum_dim_intlist(1_i64, true, None)?)
}

/// Each number's share of the sum of its row.
fn shares(numbers: &Tensor) -> Result<Tensor, Failure> {
    Ok(numbers.f_div(&row_sums(numbers)?)?)
}
