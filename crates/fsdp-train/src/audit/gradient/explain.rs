//! Looks for what explains a gradient that is wrong.

use fsdp_core::model::ParamId;
use fsdp_nn::model::Architecture;

use super::Judge;
use super::trials::{Tried, Wrong};
use crate::audit::measure::Measured;
use crate::audit::report::{Cause, EXPLAINED_MIN, Finding, number, shown};
use crate::audit::scale::Compared;
use crate::audit::sums::{Sums, total};
use crate::error::TrainError;

/// A share of the difference that dropout does not leave to other faults.
const HALF: f64 = 0.5;

/// What to look at first if nothing explains a gradient.
const UNEXPLAINED: &str = "; before the program, check the batch (all micro-batches of this step and no others, position_ids of packed \
     rows, padding) and the run file (dtype, clipping, terms of the loss): docs/auditing-reference.md has more on this";

/// How many times less another explanation has to leave to be the better one.
const BETTER: f64 = 4.0;

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Looks for what explains the difference.
    pub(super) fn explain(&mut self, exact: &Measured, bounds: &[f64]) -> Result<Vec<Finding>, TrainError> {
        let compared = self.compared(&exact.sums, bounds);
        let scaled = compared.explained();
        // Where precision is low, a factor may come near what the moments explain.
        let by_moments = self.by_moments(&compared).filter(|(finding, _)| {
            let left = |scaled: &Vec<Finding>| 1.0 - scaled[0].explains;
            scaled.as_ref().is_none_or(|scaled| BETTER * (1.0 - finding.explains) < left(scaled))
        });
        if let Some((finding, moments)) = by_moments {
            self.around.is_open = moments.is_none();
            self.around.moments = moments.unwrap_or(self.around.moments);
            return Ok(vec![finding]);
        }
        if let Some(scaled) = scaled {
            return Ok(scaled);
        }
        if let Some(finding) =
            exact.shards.iter().find_map(|(split, shards)| compared.of_ranks(shards, *split))
        {
            return Ok(vec![finding]);
        }
        if let Some(finding) = self.by_rounding(&compared)? {
            return Ok(vec![finding]);
        }
        let missing = self.missing(&compared);
        let distance2 = compared.distance2(compared.clip());
        let wrong = Wrong { bounds, distance2, largest: total(&exact.sums).largest };
        let mut best = self.by_micro_batches(&wrong)?;
        if !best.as_ref().is_some_and(Tried::is_sure) {
            best = self.best_trial(&wrong, best)?;
        }
        if let Some(Tried { finding, beside, .. }) = best.take_if(|best| !best.beside.is_empty()) {
            return Ok([vec![finding], beside].concat());
        }
        let best = best.map(|best| best.finding);
        Ok(vec![match (best, missing) {
            (Some(best), _) if best.explains > 1.0 - 1e-6 => best,
            (_, Some(missing)) => missing,
            (Some(best), None) if best.explains >= EXPLAINED_MIN => best,
            (best, None) => {
                // What another fault explains in good part is not dropout, which no other fault resembles.
                let explained = best.map_or(0.0, |best| best.explains);
                let dropout = if explained < HALF { self.by_dropout(exact, bounds)? } else { None };
                dropout.unwrap_or_else(|| self.unexplained(&self.compared(&exact.sums, bounds)))
            }
        }])
    }

    /// Parameters without any gradient, where those before them differ, too: what would have flowed through them.
    fn missing(&self, compared: &Compared<'_>) -> Option<Finding> {
        let is_missing = |index: &usize| {
            let Sums { uu, ee, .. } = compared.sums[*index];
            ee.sqrt() > 4.0 * compared.bounds[*index] && uu.sqrt() <= compared.bounds[*index]
        };
        let missing: Vec<usize> = (0..compared.sums.len()).filter(is_missing).collect();
        let blocks = &self.spec.blocks;
        let uses = |index: usize| blocks.iter().rposition(|block| block.params.contains(&ParamId(index)));
        let last = missing.iter().filter_map(|index| uses(*index)).max()?;
        let is_after = |index: &usize| uses(*index).is_some_and(|block| block > last);
        // With clipping, those after them have another factor, because the norm is another.
        let after: Vec<Sums> =
            (0..compared.sums.len()).filter(is_after).map(|index| compared.sums[index]).collect();
        let factor = total(&after).factor().filter(|_| compared.grad_clip.is_some());
        let outside = compared.outside(factor.unwrap_or(compared.clip()));
        (!outside.iter().any(is_after)).then(|| {
            let names = compared.names(&missing);
            let text = format!(
                "{} got no gradient, and what flows through them to earlier layers is missing, too",
                shown(&names)
            );
            Finding { cause: Cause::GradientMissing, params: names, factor: Some(0.0), explains: 1.0, text }
        })
    }

    fn unexplained(&self, compared: &Compared<'_>) -> Finding {
        let mut outside = compared.outside(compared.clip());
        outside.sort_by(|left, right| {
            compared.sums[*right].leftover().total_cmp(&compared.sums[*left].leftover())
        });
        let largest = compared.names(&outside[..1]);
        let all = total(compared.sums);
        let text = format!(
            "the gradient differs in {} of {} parameters, most in {}, and none of the known faults explains it (norm {} instead \
             of {}, cosine {})",
            outside.len(),
            compared.sums.iter().filter(|sums| sums.ee > 0.0 || sums.uu > 0.0).count(),
            shown(&largest),
            number(all.uu.sqrt()),
            number(all.ee.sqrt() * compared.clip()),
            all.cosine().map_or("undefined".to_owned(), number)
        ) + match self.is_as_rounded(compared) {
            true => {
                "; differences are as small as those of gradients in bfloat16: if the program reduces them in it, set fsdp.reduce_dtype"
            }
            false => "",
        } + UNEXPLAINED;
        Finding {
            cause: Cause::Unexplained,
            params: compared.names(&outside),
            factor: None,
            explains: 0.0,
            text,
        }
    }
}
