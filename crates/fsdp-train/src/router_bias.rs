//! Balancing routers without a loss (Wang et al., 2024; DeepSeek V3): after every step, the correction of each expert's score
//! grows by a fixed amount if it had fewer routes than the mean of its mixture, and falls if it had more.
//!
//! Loads are exact sums over all ranks, so that all ranks, and the oracle, make the same changes.

use std::collections::BTreeMap;

use fsdp_core::engine::StepReport;
use fsdp_core::model::ParamId;
use fsdp_nn::layer::Description;
use fsdp_nn::model::Counted;

use crate::job::Job;

/// The changes of a step to the corrections of routers, by parameter.
pub(crate) struct Changes {
    by_param: BTreeMap<ParamId, Vec<f64>>,
}

impl Changes {
    /// The changes after a step; `None` if the run makes none.
    pub(crate) fn after<A: fsdp_nn::model::Architecture>(job: &Job<A>, report: &StepReport) -> Option<Self> {
        let speed = job.config.train.router_bias_update_speed;
        if speed == 0.0 || !report.finite {
            return None;
        }
        let Description { mixtures, score_biases, .. } = job.architecture.description();
        let loads = Counted::of(job.architecture.description(), &job.plan.spec).read(report).loads;
        let by_param = mixtures.keys().zip(loads).filter_map(|(block, loads)| {
            let param = score_biases.get(block)?;
            Some((*param, directions(&loads).map(|direction| direction * speed).collect()))
        });
        Some(Self { by_param: by_param.collect() })
    }

    /// Whether a parameter is changed.
    pub(crate) fn has(&self, param: ParamId) -> bool {
        self.by_param.contains_key(&param)
    }

    /// Adds the changes of a parameter to its elements from `first` on.
    pub(crate) fn add(&self, param: ParamId, first: usize, values: &mut [f64]) {
        values.iter_mut().zip(&self.by_param[&param][first..]).for_each(|(value, change)| *value += change);
    }
}

/// For each expert, 1 if it has fewer routes than the mean, -1 if it has more, else 0.
fn directions(loads: &[u64]) -> impl Iterator<Item = f64> {
    let (experts, total) = (loads.len() as u128, loads.iter().map(|&load| u128::from(load)).sum::<u128>());
    loads.iter().map(move |&load| match (u128::from(load) * experts).cmp(&total) {
        std::cmp::Ordering::Less => 1.0,
        std::cmp::Ordering::Equal => 0.0,
        std::cmp::Ordering::Greater => -1.0,
    })
}

#[cfg(test)]
mod tests {
    use super::directions;

    #[test]
    fn corrections_move_towards_even_loads() {
        let of = |loads: &[u64]| directions(loads).collect::<Vec<f64>>();
        assert_eq!(of(&[3, 3, 3]), [0.0; 3]);
        assert_eq!(of(&[9, 0, 3, 4]), [-1.0, 1.0, 1.0, 0.0]);
        // The mean, 8/3, is between the two.
        assert_eq!(of(&[2, 3, 3]), [1.0, -1.0, -1.0]);
        assert_eq!(of(&[u64::MAX, u64::MAX - 1]), [-1.0, 1.0]);
        assert_eq!(of(&[0, 0]), [0.0; 2]);
    }
}
