//! What a cluster is: devices, the links between them and what they cost, with where each number is from.

use std::collections::BTreeMap;
use std::fmt;

use fsdp_core::DType;
use serde::{Deserialize, Serialize};

use crate::measured::Measured;

/// The clusters that are known by name: the text of a file for each.
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

/// Shorter names, as people say them: the usual machine of that kind.
const ALIASES: [(&str, &str); 7] = [
    ("a100", "a100-80-sxm"),
    ("a100-40", "a100-40-sxm"),
    ("a100-80", "a100-80-sxm"),
    ("h100", "h100-sxm"),
    ("h200", "h200-sxm"),
    ("b200", "b200-sxm"),
    ("cpu", "cpu-2core"),
];

/// A number, and where it is from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sourced {
    /// The number.
    pub value: f64,
    /// Where it is from: a document that can be looked up, or "assumed" and why.
    pub source: String,
}

/// What kind of devices a cluster has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Graphics processors.
    Gpu,
    /// Tensor processors.
    Tpu,
    /// Processors.
    Cpu,
}

/// What connects devices of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// NVLink, with switches.
    Nvlink,
    /// PCI Express.
    Pcie,
    /// AMD's Infinity Fabric.
    Xgmi,
    /// A torus of direct links, which reaches beyond a node.
    Torus,
    /// The memory of the machine.
    Memory,
}

/// Machines of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// What it is called.
    pub name: String,
    /// What it is, in a line.
    pub about: String,
    /// What kind of devices it has.
    pub kind: Kind,
    /// Devices of one generation share the constants that are fitted: `ampere`, `hopper`, `blackwell` or `cdna3` of GPUs,
    /// `tpu-v4`, `tpu-v5e` or `tpu-v5p` of TPUs, `x86` of processors.
    pub generation: String,
    /// How many machines there are; without it as many as a run asks for.
    pub nodes: Option<usize>,
    /// One device.
    pub device: Device,
    /// The devices of a machine.
    pub node: Node,
    /// What connects nodes; of a torus, its slices.
    pub network: Option<Network>,
    /// Where checkpoints go.
    pub storage: Storage,
    /// What it costs, and how often it fails.
    pub operation: Operation,
    /// What was measured on it.
    pub measured: Option<Measured>,
}

/// One device; of processors the whole machine, which its ranks share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Bytes of memory that programs get.
    pub memory: Sourced,
    /// Bytes a second of that memory.
    pub memory_bandwidth: Sourced,
    /// Multiprocessors, compute units or cores.
    pub units: Sourced,
    /// Floating-point operations a second in products, by element type.
    pub peak: BTreeMap<String, Sourced>,
}

/// The devices of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// How many; of processors how many ranks a machine has room for.
    pub devices: Sourced,
    /// Bytes a second between a device and the memory of its host, one way.
    pub host_link: Sourced,
    /// What connects them.
    pub link: Link,
}

/// What connects devices of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// What it is.
    pub kind: LinkKind,
    /// Bytes a second of a device, one way; of a torus over all its links.
    pub bandwidth: Sourced,
    /// Seconds of a hop.
    pub latency: Sourced,
    /// Devices of the largest torus.
    pub largest: Option<Sourced>,
}

/// What connects nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Bytes a second of a node, one way.
    pub bandwidth: Sourced,
    /// Seconds of a hop.
    pub latency: Sourced,
}

/// Where checkpoints go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Bytes a second that a node writes.
    pub write: Sourced,
}

/// What a cluster costs, and how often it fails.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operation {
    /// How often a year a device ends a run.
    pub failures_per_device_year: Sourced,
    /// US dollars.
    pub price_per_device_hour: Sourced,
}

/// What is wrong with the description of a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No cluster is known by this name.
    #[error("no cluster is called `{name}`; {}known are {}, or give a file with --cluster", near(.name), names().join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
    /// It is no TOML, or lacks a key, or has one that has no meaning.
    #[error("{origin}: {source}")]
    Toml {
        /// The file.
        origin: String,
        /// What and where.
        source: Box<toml::de::Error>,
    },
    /// A number that can not be.
    #[error("{origin}: `{key}` is {value}, which must be {allowed}")]
    Impossible {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// Its value.
        value: f64,
        /// What it may be.
        allowed: &'static str,
    },
    /// Nothing is known of devices of a generation.
    #[error("{origin}: `generation` is {generation:?}, which must be that of devices whose runs are known: {}", .known.join(", "))]
    Generation {
        /// The file.
        origin: String,
        /// What it says.
        generation: String,
        /// What it may say.
        known: Vec<&'static str>,
    },
    /// There is no peak for an element type.
    #[error("{name} has no `device.peak.{dtype}`: it says {}", .known.join(", "))]
    NoPeak {
        /// The cluster.
        name: String,
        /// The element type.
        dtype: String,
        /// Those that it has.
        known: Vec<String>,
    },
}

/// All names of clusters.
pub fn names() -> Vec<&'static str> {
    KNOWN.iter().map(|(name, _)| *name).collect()
}

/// The nearest name or shorter name; of several those that begin in the same way.
fn near(name: &str) -> String {
    let asked = name.to_lowercase();
    let distance = |known: &&str| strsim::damerau_levenshtein(known, &asked);
    let is_other = |known: &&str| known.chars().next() != asked.chars().next();
    let all = names().into_iter().chain(ALIASES.iter().map(|(alias, _)| *alias));
    let near = all.min_by_key(|known| (distance(known), is_other(known)));
    let near = near.filter(|known| distance(known) <= known.len() / 2);
    near.map(|near| format!("did you mean `{near}`? ")).unwrap_or_default()
}

impl Cluster {
    /// A cluster by its name, or by a shorter one (`a100-80`), in letters of any case.
    ///
    /// # Errors
    /// [`ClusterError::Unknown`], which names the nearest.
    pub fn known(name: &str) -> Result<Self, ClusterError> {
        let asked = name.to_lowercase();
        let full = ALIASES.iter().find(|(alias, _)| *alias == asked).map_or(asked.as_str(), |(_, full)| full);
        let text = KNOWN.iter().find(|(known, _)| *known == full).map(|(_, text)| text);
        let text = text.ok_or_else(|| ClusterError::Unknown { name: name.to_owned() })?;
        Self::parse(text, name)
    }

    /// Reads the text of a file, which `origin` names in errors.
    ///
    /// # Errors
    /// [`ClusterError`]: no TOML, a missing or unknown key with its line, a number that can not be.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ClusterError> {
        let toml = |source| ClusterError::Toml { origin: origin.to_owned(), source: Box::new(source) };
        let cluster: Self = toml::from_str(text).map_err(toml)?;
        cluster.check(origin)?;
        Ok(cluster)
    }

    /// As a file, with a line for each measured point.
    pub fn to_toml(&self) -> String {
        let specified = Self { measured: None, ..self.clone() };
        let text = toml::to_string(&specified).expect("a cluster is tables of numbers and texts");
        let measured = self.measured.as_ref().map(|measured| format!("\n{}", measured.to_toml()));
        text + &measured.unwrap_or_default()
    }

    /// How many of a world's ranks share a device: those of a machine share its processors.
    pub fn sharing(&self, world: usize) -> usize {
        if self.kind == Kind::Cpu { world.clamp(1, self.devices_per_node()) } else { 1 }
    }

    /// Floating-point operations a second in products of an element type.
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

    /// Devices of a node.
    pub fn devices_per_node(&self) -> usize {
        self.node.devices.value as usize
    }

    /// Devices that the links of a node reach: those of a node, or of a torus.
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
