//! The numbers of a cluster by key, and their allowed ranges.

use super::{Cluster, ClusterError, Kind, Sourced};
use crate::measured::Measured;

/// Generations that have fitted constants, or another generation that stands in.
fn generations(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Gpu => &["ampere", "hopper", "blackwell", "cdna3"],
        Kind::Tpu => &["tpu-v4", "tpu-v5e", "tpu-v5p"],
        Kind::Cpu => &["x86"],
    }
}

impl Cluster {
    /// Returns all numbers with their keys, in the order of the file.
    pub fn numbers(&self) -> Vec<(String, &Sourced)> {
        let mut all = vec![
            ("device.memory".to_owned(), &self.device.memory),
            ("device.memory_bandwidth".to_owned(), &self.device.memory_bandwidth),
            ("device.units".to_owned(), &self.device.units),
        ];
        all.extend(self.device.peak.iter().map(|(dtype, peak)| (format!("device.peak.{dtype}"), peak)));
        let (node, link) = (&self.node, &self.node.link);
        all.push(("node.devices".to_owned(), &node.devices));
        all.push(("node.host_link".to_owned(), &node.host_link));
        all.push(("node.link.bandwidth".to_owned(), &link.bandwidth));
        all.push(("node.link.latency".to_owned(), &link.latency));
        all.extend(link.largest.iter().map(|largest| ("node.link.largest".to_owned(), largest)));
        if let Some(network) = &self.network {
            all.push(("network.bandwidth".to_owned(), &network.bandwidth));
            all.push(("network.latency".to_owned(), &network.latency));
        }
        all.push(("storage.write".to_owned(), &self.storage.write));
        let operation = &self.operation;
        all.push(("operation.failures_per_device_year".to_owned(), &operation.failures_per_device_year));
        all.push(("operation.price_per_device_hour".to_owned(), &operation.price_per_device_hour));
        all
    }

    /// Checks that all numbers are in their allowed ranges.
    ///
    /// # Errors
    /// [`ClusterError::Impossible`]; [`ClusterError::Generation`].
    pub(super) fn check(&self, origin: &str) -> Result<(), ClusterError> {
        let counts = ["device.units", "node.devices", "node.link.largest"];
        for (key, &Sourced { value, .. }) in self.numbers() {
            let allowed = match () {
                () if counts.contains(&&*key) => Some("a whole number, at least 1")
                    .filter(|_| !(value >= 1.0 && value.fract() == 0.0 && value < 1e9)),
                () if key.ends_with("latency") => Some("seconds, at most 0.1 (a microsecond is 1e-6)")
                    .filter(|_| !(0.0..=0.1).contains(&value)),
                () if key.starts_with("operation.") => {
                    Some("a number from 0 to 1e6").filter(|_| !(0.0..=1e6).contains(&value))
                }
                // Measured numbers need no guard against wrong units.
                () if key.starts_with("device.peak") && self.measured.is_none() => {
                    Some("operations a second, from 1e9 to 1e18 (a TFLOP/s is 1e12)")
                        .filter(|_| !(1e9..=1e18).contains(&value))
                }
                () if self.measured.is_none() => Some("bytes, or bytes a second, from 1e6 to 1e15")
                    .filter(|_| !(1e6..=1e15).contains(&value)),
                () => Some("a number above 0").filter(|_| !(value > 0.0 && value.is_finite())),
            };
            if let Some(allowed) = allowed {
                return Err(ClusterError::Impossible { origin: origin.to_owned(), key, value, allowed });
            }
        }
        let known = generations(self.kind);
        if !known.contains(&&*self.generation) {
            let (origin, generation) = (origin.to_owned(), self.generation.clone());
            return Err(ClusterError::Generation { origin, generation, known: known.to_vec() });
        }
        if self.nodes == Some(0) {
            let (origin, key) = (origin.to_owned(), "nodes".to_owned());
            return Err(ClusterError::Impossible { origin, key, value: 0.0, allowed: "at least 1" });
        }
        let wrong = self.measured.as_ref().and_then(Measured::impossible);
        wrong.map_or(Ok(()), |(key, value)| {
            let (origin, allowed) =
                (origin.to_owned(), "a number above 0 (at least 0 for issue, between_calls and work)");
            Err(ClusterError::Impossible { origin, key, value, allowed })
        })
    }
}
