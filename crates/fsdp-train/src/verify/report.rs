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
    /// The parameter with the largest difference.
    pub param: Option<String>,
    /// Index of the element within it.
    pub element: usize,
    /// Elements whose bits differ.
    pub differing: u64,
    /// Elements compared.
    pub compared: u64,
}

/// Predicted and counted bytes of one memory category (the largest rank).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryLine {
    /// Whose memory: `device` or `host`.
    pub place: &'static str,
    /// The category, or `total`.
    pub category: &'static str,
    /// The ledger's peak.
    pub predicted_bytes: usize,
    /// The memory's own peak.
    pub counted_bytes: usize,
}

/// One kind of collective: measured and expected, summed over all ranks and steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TrafficLine {
    /// The collective.
    pub collective: &'static str,
    /// Calls.
    pub calls: u64,
    /// Calls by the closed form.
    pub expected_calls: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// Bytes by the closed form.
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
        // Only weights from files are broadcast, and only to replicas.
        lines.filter(|line| line.collective != BROADCAST || line.calls + line.expected_calls > 0).collect()
    }
}

const BROADCAST: &str = "broadcast";

/// The collectives that are counted, by name: calls and bytes.
pub(super) fn counts(traffic: &mut Traffic) -> [(&'static str, [&mut u64; 2]); 4] {
    let Traffic {
        all_gathers,
        all_gather_bytes,
        reduce_scatters,
        reduce_scatter_bytes,
        all_reduces,
        all_reduce_bytes,
        broadcasts,
        broadcast_bytes,
    } = traffic;
    [
        ("all-gather", [all_gathers, all_gather_bytes]),
        ("reduce-scatter", [reduce_scatters, reduce_scatter_bytes]),
        ("all-reduce", [all_reduces, all_reduce_bytes]),
        (BROADCAST, [broadcasts, broadcast_bytes]),
    ]
}

/// One world size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorldReport {
    /// Ranks.
    pub world: usize,
    /// Size of the replicate axis.
    pub replicas: usize,
    /// Size of the shard axis.
    pub shards: usize,
    /// What is promised.
    pub promise: &'static str,
    /// Losses of all steps.
    pub losses: Vec<f64>,
    /// Largest difference of a loss.
    pub loss_difference: f64,
    /// Largest difference of a gradient norm.
    pub norm_difference: f64,
    /// Parameters after the last step.
    pub params: Difference,
    /// Gradients of the first step.
    pub gradients: Difference,
    /// Optimizer state after the last step.
    pub states: Difference,
    /// Communication.
    pub traffic: Vec<TrafficLine>,
    /// Memory.
    pub memory: Vec<MemoryLine>,
    /// Broken promises, each a sentence.
    pub failures: Vec<String>,
}

/// A world size that does not fit the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Ranks.
    pub world: usize,
    /// Why.
    pub reason: String,
}

/// The result of a verification.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyReport {
    /// Elements of the model.
    pub parameters: usize,
    /// Units.
    pub units: usize,
    /// Micro-batches per step, V.
    pub micro_batches: usize,
    /// Steps.
    pub steps: u64,
    /// Losses of the oracle; none when no world size fits.
    pub oracle_losses: Vec<f64>,
    /// One entry per verified world size.
    pub worlds: Vec<WorldReport>,
    /// World sizes that do not fit.
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
    /// Lines of all categories and the total, of the device and then of the host.
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
