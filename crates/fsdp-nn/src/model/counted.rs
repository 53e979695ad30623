//! What models sum up beside their loss: the parts that training adds to it, and how many tokens each expert got.

use fsdp_core::Tallies;
use fsdp_core::engine::StepReport;
use fsdp_core::model::ModelSpec;

use crate::layer::Description;

/// Where a model's sums and counts lie among its [`Tallies`]: the balancing loss of routers first, where the model has mixtures,
/// then the z-loss, where that is told apart; counts by mixture and expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Experts of each mixture.
    experts: usize,
    tallies: Tallies,
}

/// The parts of a step's loss and the load of its experts.
#[derive(Clone, Debug, PartialEq)]
pub struct StepParts {
    /// The sum of balancing losses, with their coefficient, over all targets, where the model has mixtures.
    pub router_loss: Option<f64>,
    /// The sum of z-losses, with their coefficient, over all targets, where it is told apart.
    pub z_loss: Option<f64>,
    /// For each mixture, in the order of blocks, how many tokens each expert got. Tokens behind the last counted target of their
    /// sample are not counted, as in the balancing loss.
    pub loads: Vec<Vec<u64>>,
}

impl Counted {
    /// What a described model sums up, before a run adds to it.
    pub(crate) fn tallies(description: &Description) -> Tallies {
        let counts = description.mixtures.values().sum();
        Tallies { sums: usize::from(counts > 0), counts }
    }

    /// What `spec` sums up, which may have [another sum](Counted::with_z_loss) than the described model.
    pub fn of(description: &Description, spec: &ModelSpec) -> Self {
        let experts = description.mixtures.values().next().copied().unwrap_or(0);
        Self { experts, tallies: spec.tallies }
    }

    /// Tells the z-loss apart.
    pub fn with_z_loss(spec: &mut ModelSpec) {
        spec.tallies.sums += 1;
    }

    /// The number of the sum of balancing losses.
    pub(crate) fn router_loss(self) -> Option<usize> {
        (self.experts > 0).then_some(0)
    }

    /// The number of the sum of z-losses.
    pub(crate) fn z_loss(self) -> Option<usize> {
        let index = usize::from(self.experts > 0);
        (self.tallies.sums > index).then_some(index)
    }

    /// All of it.
    pub(crate) fn all(self) -> Tallies {
        self.tallies
    }

    /// What a report says.
    pub fn read(self, report: &StepReport) -> StepParts {
        let sum = |index: usize| report.sums[index];
        let loads = report.counts.chunks(self.experts.max(1)).map(<[u64]>::to_vec).collect();
        StepParts { router_loss: self.router_loss().map(sum), z_loss: self.z_loss().map(sum), loads }
    }
}
