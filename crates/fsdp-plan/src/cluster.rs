//! The description of a cluster: devices, the links between them, and costs, each number with its source.

use std::collections::BTreeMap;
use std::fmt;

use fsdp_core::DType;
use serde::{Deserialize, Serialize};

use crate::measured::Measured;

/// The built-in clusters, by name: the text of the file of each.
const KNOWN: [(&str, &str); 14] = [
    ("a100-40-sxm", include_str!("../clusters/a100-40-sxm.toml")),
    ("a100-40-pcie", include_str!("../clusters/a100-40-pcie.toml")),
    ("a100-80-sxm", include_str!("../clusters/a100-80-sxm.toml")),
    ("a100-80-pcie", include_str!("../clusters/a100-80-pcie.toml")),
    ("h100-sxm", include_str!("../clusters/h100-sxm.toml")),
    ("h100-pcie", include_str!("../clusters/h100-pcie.toml")),
    ("h200-sxm", include_str!("../clusters/h200-sxm.toml")),
    ("b200-sxm", include_str!("../clusters/b200-sxm.toml")),
    ("mi300x", include_str!("../clusters/mi300x.toml")),
    ("tpu-v4", include_str!("../clusters/tpu-v4.toml")),
    ("tpu-v5e", include_str!("../clusters/tpu-v5e.toml")),
    ("tpu-v5p", include_str!("../clusters/tpu-v5p.toml")),
    ("cpu-2core", include_str!("../clusters/cpu-2core.toml")),
    ("cpu-96core", include_str!("../clusters/cpu-96core.toml")),
];

/// Aliases in common use: the usual machine of that kind.
const ALIASES: [(&str, &str); 7] = [
    ("a100", "a100-80-sxm"),
    ("a100-40", "a100-40-sxm"),
    ("a100-80", "a100-80-sxm"),
    ("h100", "h100-sxm"),
    ("h200", "h200-sxm"),
    ("b200", "b200-sxm"),
    ("cpu", "cpu-2core"),
];

/// A number and its source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sourced {
    /// The number.
    pub value: f64,
    /// A document that can be looked up, or "assumed" and why.
    pub source: String,
}

/// The kind of devices of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// GPUs.
    Gpu,
    /// TPUs.
    Tpu,
    /// CPUs.
    Cpu,
}

/// The kind of link between devices of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// NVLink with switches.
    Nvlink,
    /// PCI Express.
    Pcie,
    /// AMD's Infinity Fabric.
    Xgmi,
    /// A torus of direct links, which extends beyond a node.
    Torus,
    /// Main memory of the machine.
    Memory,
}

/// A cluster of equal machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Name of the cluster.
    pub name: String,
    /// Description in one line.
    pub about: String,
    /// The kind of its devices.
    pub kind: Kind,
    /// Generation of the devices; devices of one generation share fitted constants. `ampere`, `hopper`, `blackwell` or
    /// `cdna3` for GPUs, `tpu-v4`, `tpu-v5e` or `tpu-v5p` for TPUs, `x86` for CPUs.
    pub generation: String,
    /// Number of machines; `None` for as many as a run asks for.
    pub nodes: Option<usize>,
    /// One device.
    pub device: Device,
    /// The devices of a machine.
    pub node: Node,
    /// The network between nodes or, for a torus, between its slices; `None` without one.
    pub network: Option<Network>,
    /// Storage for checkpoints.
    pub storage: Storage,
    /// Price and failure rate.
    pub operation: Operation,
    /// Measurements on this machine; `None` if it was not calibrated.
    pub measured: Option<Measured>,
}

/// One device; for CPUs the whole machine, which its ranks share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Bytes of memory available to programs.
    pub memory: Sourced,
    /// Bandwidth of that memory in bytes per second.
    pub memory_bandwidth: Sourced,
    /// Number of multiprocessors, compute units or cores.
    pub units: Sourced,
    /// Peak rate of matrix products in floating-point operations per second, by dtype.
    pub peak: BTreeMap<String, Sourced>,
}

/// The devices of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Number of devices; for CPUs, the number of ranks that a machine has room for.
    pub devices: Sourced,
    /// Bandwidth between a device and host memory in bytes per second, one way.
    pub host_link: Sourced,
    /// The link between the devices.
    pub link: Link,
}

/// The link between devices of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Kind of the link.
    pub kind: LinkKind,
    /// Bandwidth of a device in bytes per second, one way; for a torus, over all its links.
    pub bandwidth: Sourced,
    /// Latency of a hop in seconds.
    pub latency: Sourced,
    /// Number of devices of the largest torus; `None` for other links.
    pub largest: Option<Sourced>,
}

/// The network between nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Bandwidth of a node in bytes per second, one way.
    pub bandwidth: Sourced,
    /// Latency of a hop in seconds.
    pub latency: Sourced,
}

/// Storage for checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Write bandwidth of a node in bytes per second.
    pub write: Sourced,
}

/// Price and failure rate of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operation {
    /// Failures that end a run, per device and year.
    pub failures_per_device_year: Sourced,
    /// Price in US dollars per device and hour.
    pub price_per_device_hour: Sourced,
}

/// Errors in the description of a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No built-in cluster has this name.
    #[error("unknown cluster `{name}`; {}choose one of {}, or pass a file with --cluster", near(.name), names().join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
    /// The file is not valid TOML, lacks a key, or has an unknown key.
    #[error("{origin}: {source}")]
    Toml {
        /// The file.
        origin: String,
        /// The problem and its position.
        source: Box<toml::de::Error>,
    },
    /// A number is outside of the allowed range.
    #[error("{origin}: `{key}` is {value}, but must be {allowed}")]
    Impossible {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// Its value.
        value: f64,
        /// The allowed values.
        allowed: &'static str,
    },
    /// No published run is known for devices of this generation, nor another generation that stands in.
    #[error("{origin}: `generation` is {generation:?}, but must be that of devices with known runs: {}", .known.join(", "))]
    Generation {
        /// The file.
        origin: String,
        /// The value in the file.
        generation: String,
        /// The allowed values.
        known: Vec<&'static str>,
    },
    /// The cluster states no peak for a dtype.
    #[error("{name} has no `device.peak.{dtype}`, only {}", .known.join(", "))]
    NoPeak {
        /// The cluster.
        name: String,
        /// The dtype.
        dtype: String,
        /// The dtypes with a peak.
        known: Vec<String>,
    },
}

/// Names of all built-in clusters.
pub fn names() -> Vec<&'static str> {
    KNOWN.iter().map(|(name, _)| *name).collect()
}

/// A hint with the name or alias nearest to `name`, if any is near; among equally near ones, one with the same first
/// letter.
fn near(name: &str) -> String {
    let lowercase = name.to_lowercase();
    let distance = |known: &&str| strsim::damerau_levenshtein(known, &lowercase);
    let is_other = |known: &&str| known.chars().next() != lowercase.chars().next();
    let all = names().into_iter().chain(ALIASES.iter().map(|(alias, _)| *alias));
    let near = all.min_by_key(|known| (distance(known), is_other(known)));
    let near = near.filter(|known| distance(known) <= known.len() / 2);
    near.map(|near| format!("did you mean `{near}`? ")).unwrap_or_default()
}

impl Cluster {
    /// Returns a built-in cluster by name or alias (`a100-80`), ignoring case.
    ///
    /// # Errors
    /// [`ClusterError::Unknown`], which suggests the nearest name.
    pub fn known(name: &str) -> Result<Self, ClusterError> {
        let lowercase = name.to_lowercase();
        let full = ALIASES
            .iter()
            .find(|(alias, _)| *alias == lowercase)
            .map_or(lowercase.as_str(), |(_, full)| full);
        let text = KNOWN.iter().find(|(known, _)| *known == full).map(|(_, text)| text);
        let text = text.ok_or_else(|| ClusterError::Unknown { name: name.to_owned() })?;
        Self::parse(text, name)
    }

    /// Parses the text of a cluster file; `origin` names the file in errors.
    ///
    /// # Errors
    /// [`ClusterError`]: invalid TOML, a missing or unknown key with its line, or a number outside of the allowed
    /// range.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ClusterError> {
        let toml = |source| ClusterError::Toml { origin: origin.to_owned(), source: Box::new(source) };
        let cluster: Self = toml::from_str(text).map_err(toml)?;
        cluster.check(origin)?;
        Ok(cluster)
    }

    /// Formats the cluster as a file, with one line per measured point.
    pub fn to_toml(&self) -> String {
        let specified = Self { measured: None, ..self.clone() };
        let text = toml::to_string(&specified).expect("a cluster is tables of numbers and texts");
        let measured = self.measured.as_ref().map(|measured| format!("\n{}", measured.to_toml()));
        text + &measured.unwrap_or_default()
    }

    /// Number of ranks of a world that share a device: on CPUs, the ranks of a machine share its processors.
    pub fn sharing(&self, world: usize) -> usize {
        if self.kind == Kind::Cpu { world.clamp(1, self.devices_per_node()) } else { 1 }
    }

    /// Peak rate of matrix products of a dtype in floating-point operations per second.
    ///
    /// # Errors
    /// [`ClusterError::NoPeak`].
    pub fn peak(&self, dtype: DType) -> Result<f64, ClusterError> {
        let missing = || ClusterError::NoPeak {
            name: self.name.clone(),
            dtype: dtype.to_string(),
            known: self.device.peak.keys().cloned().collect(),
        };
        self.device.peak.get(&dtype.to_string()).map(|peak| peak.value).ok_or_else(missing)
    }

    /// Number of devices of a node.
    pub fn devices_per_node(&self) -> usize {
        self.node.devices.value as usize
    }

    /// Number of devices that the links of a node reach: those of the node, or of the torus.
    pub fn scale_up(&self) -> usize {
        self.node.link.largest.as_ref().map_or(self.devices_per_node(), |largest| largest.value as usize)
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.about)
    }
}

mod numbers;
#[cfg(test)]
mod tests;
