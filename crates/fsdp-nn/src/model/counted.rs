//! Sums and counts beside the loss: the parts that training adds to it, and the number of tokens routed to each
//! expert.

use fsdp_core::Tallies;
use fsdp_core::engine::StepReport;
use fsdp_core::model::ModelSpec;

use crate::layer::Description;
use crate::op::ROUTER_SUMS;

/// The layout of a model's sums and counts within its [`Tallies`]. Sums: those of the routers first, if the model has
/// mixtures, then the z-loss, if it is reported separately. Counts: by mixture and expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Experts per mixture.
    experts: usize,
    tallies: Tallies,
}

/// The parts of a step's loss and the load of its experts.
#[derive(Clone, Debug, PartialEq)]
pub struct StepParts {
    /// The sum of balancing losses over all targets, including their coefficient. `None` if the model has no
    /// mixtures.
    pub router_loss: Option<f64>,
    /// As [`StepParts::router_loss`], the sum of the routers' z-losses.
    pub router_z_loss: Option<f64>,
    /// As [`StepParts::router_loss`], the sum of the routers' sequence-wise balance losses.
    pub router_sequence_loss: Option<f64>,
    /// The sum of z-losses over all targets, including their coefficient. `None` if it is not reported separately.
    pub z_loss: Option<f64>,
    /// For each mixture, in block order, the number of tokens routed to each expert. Tokens after the last counted
    /// target of their sample are not counted, as in the balancing loss.
    pub loads: Vec<Vec<u64>>,
}

impl Counted {
    /// Returns the layout for `spec`, which may have [a sum](Counted::with_z_loss) that the described model does not.
    pub fn of(description: &Description, spec: &ModelSpec) -> Self {
        let experts = description.mixtures.values().next().copied().unwrap_or(0);
        Self { experts, tallies: spec.tallies }
    }

    /// Adds a separate sum for the z-loss.
    pub fn with_z_loss(spec: &mut ModelSpec) {
        spec.tallies.sums += 1;
    }

    /// Returns the index of the sum of balancing losses.
    pub(crate) fn router_loss(self) -> Option<usize> {
        (self.experts > 0).then_some(0)
    }

    /// Returns the index of the sum of the routers' z-losses.
    pub(crate) fn router_z_loss(self) -> Option<usize> {
        (self.experts > 0).then_some(1)
    }

    /// Returns the index of the sum of the routers' sequence-wise losses.
    pub(crate) fn router_sequence_loss(self) -> Option<usize> {
        (self.experts > 0).then_some(2)
    }

    /// Returns the index of the sum of z-losses.
    pub(crate) fn z_loss(self) -> Option<usize> {
        let index = if self.experts > 0 { ROUTER_SUMS } else { 0 };
        (self.tallies.sums > index).then_some(index)
    }

    /// Returns all tallies.
    pub(crate) fn all(self) -> Tallies {
        self.tallies
    }

    /// Extracts the parts from a report.
    pub fn read(self, report: &StepReport) -> StepParts {
        let sum = |index: usize| report.sums[index];
        let loads = report.counts.chunks(self.experts.max(1)).map(<[u64]>::to_vec).collect();
        StepParts {
            router_loss: self.router_loss().map(sum),
            router_z_loss: self.router_z_loss().map(sum),
            router_sequence_loss: self.router_sequence_loss().map(sum),
            z_loss: self.z_loss().map(sum),
            loads,
        }
    }
}
