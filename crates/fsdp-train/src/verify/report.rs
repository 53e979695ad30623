//! The result of a verification, as data.

use fsdp_core::comm::Traffic;
use fsdp_core::memory::{Bytes, Category, Usage};
use serde::Serialize;

use crate::job::Job;

/// The largest difference of one kind of values between a sharded run and the oracle.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// Largest absolute difference; 0 when all bits are equal.
    pub largest: f64,
    /// The parameter with the largest difference; `None` if all bits are equal.
    pub param: Option<String>,
    /// Index of the element within it.
    pub element: usize,
    /// Number of elements whose bits differ.
    pub differing: u64,
    /// Number of elements compared.
    pub compared: u64,
}

/// Predicted and counted bytes of one memory category, on the worst rank: one whose prediction fails, else the one that
/// counts most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryLine {
    /// The memory: `device` or `host`.
    pub place: &'static str,
    /// The category, or `total`.
    pub category: &'static str,
    /// The peak that the ledger predicts.
    pub predicted_bytes: usize,
    /// The peak that the memory counted.
    pub counted_bytes: usize,
}

/// One kind of collective: counted and expected, summed over all ranks, with all steps and the loading of weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TrafficLine {
    /// The collective.
    pub collective: &'static str,
    /// Number of calls.
    pub calls: u64,
    /// Number of calls according to the closed form.
    pub expected_calls: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// Bytes sent according to the closed form.
    pub expected_bytes: u64,
}

impl TrafficLine {
    pub(super) fn of(mut got: Traffic, mut want: Traffic) -> Vec<Self> {
        let both = counts(&mut got).into_iter().zip(counts(&mut want));
        let lines = both.map(|((collective, got), (_, want))| {
            let ([calls, bytes], [expected_calls, expected_bytes]) =
                (got.map(|count| *count), want.map(|count| *count));
            TrafficLine { collective, calls, expected_calls, bytes, expected_bytes }
        });
        // Few runs need these.
        let is_rare = |line: &TrafficLine| [ALL_TO_ALL, BROADCAST].contains(&line.collective);
        lines.filter(|line| !is_rare(line) || line.calls + line.expected_calls > 0).collect()
    }
}

const ALL_TO_ALL: &str = "all-to-all";
const BROADCAST: &str = "broadcast";

/// The counters of each kind of collective, by name: calls and bytes.
pub(super) fn counts(traffic: &mut Traffic) -> [(&'static str, [&mut u64; 2]); 5] {
    let Traffic {
        all_gathers,
        all_gather_bytes,
        reduce_scatters,
        reduce_scatter_bytes,
        all_reduces,
        all_reduce_bytes,
        all_to_alls,
        all_to_all_bytes,
        broadcasts,
        broadcast_bytes,
    } = traffic;
    [
        ("all-gather", [all_gathers, all_gather_bytes]),
        ("reduce-scatter", [reduce_scatters, reduce_scatter_bytes]),
        ("all-reduce", [all_reduces, all_reduce_bytes]),
        (ALL_TO_ALL, [all_to_alls, all_to_all_bytes]),
        (BROADCAST, [broadcasts, broadcast_bytes]),
    ]
}

/// The result for one world size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorldReport {
    /// Number of ranks.
    pub world: usize,
    /// Size of the replicate axis.
    pub replicas: usize,
    /// Size of the shard axis.
    pub shards: usize,
    /// Size of the context axis.
    pub context: usize,
    /// Size of the expert axis.
    pub expert: usize,
    /// The name of the promise.
    pub promise: &'static str,
    /// The losses of all steps.
    pub losses: Vec<f64>,
    /// Largest absolute difference between a loss and the oracle's.
    pub loss_difference: f64,
    /// Largest absolute difference between a gradient norm and the oracle's.
    pub norm_difference: f64,
    /// Difference of the parameters after the last step.
    pub params: Difference,
    /// Difference of the gradients of the first step that was not skipped.
    pub gradients: Difference,
    /// Difference of the optimizer state after the last step.
    pub states: Difference,
    /// Communication, by kind of collective.
    pub traffic: Vec<TrafficLine>,
    /// Memory, by category.
    pub memory: Vec<MemoryLine>,
    /// Broken promises, each a sentence.
    pub failures: Vec<String>,
}

/// A world size that does not fit the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Number of ranks.
    pub world: usize,
    /// Why it was skipped.
    pub reason: String,
}

/// The result of a verification.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyReport {
    /// Number of elements in all parameters of the model.
    pub parameters: usize,
    /// Number of units.
    pub units: usize,
    /// Micro-batches per step, V.
    pub micro_batches: usize,
    /// Number of steps.
    pub steps: u64,
    /// The losses of the oracle; empty if no world size fits.
    pub oracle_losses: Vec<f64>,
    /// One entry per verified world size.
    pub worlds: Vec<WorldReport>,
    /// World sizes that do not fit the configuration.
    pub skipped: Vec<Skipped>,
}

impl VerifyReport {
    pub(super) fn new<A>(job: &Job<A>, steps: u64) -> Self {
        Self {
            parameters: job.plan.spec.elements(),
            units: job.plan.layout.units.len(),
            micro_batches: job.data.micro_batches(),
            steps,
            oracle_losses: Vec::new(),
            worlds: Vec::new(),
            skipped: Vec::new(),
        }
    }

    /// Whether at least one world size was verified and every promise was kept.
    pub fn holds(&self) -> bool {
        !self.worlds.is_empty() && self.worlds.iter().all(|world| world.failures.is_empty())
    }
}

impl MemoryLine {
    /// Creates the lines of all categories and the total, for the device and then for the host.
    pub(super) fn all(predicted: &Usage, counted: &Usage) -> Vec<Self> {
        let mut lines = Self::of("device", &predicted.device, &counted.device);
        lines.extend(Self::of("host", &predicted.host, &counted.host));
        lines
    }

    fn of(place: &'static str, predicted: &Bytes, counted: &Bytes) -> Vec<Self> {
        let line = |category, predicted_bytes, counted_bytes| MemoryLine {
            place,
            category,
            predicted_bytes,
            counted_bytes,
        };
        let total = line("total", predicted.total_peak_bytes, counted.total_peak_bytes);
        let of_category = |of: Category| line(of.name(), predicted.peak(of), counted.peak(of));
        Category::ALL.into_iter().map(of_category).chain([total]).collect()
    }
}
