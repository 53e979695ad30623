//! Constants of prices that no datasheet states: `tools/published` fits them to published runs, and writes
//! `constants.toml`.

use std::collections::BTreeMap;

use crate::cluster::{Cluster, Kind};

/// The fitted constants.
const FITTED: &str = include_str!("../constants.toml");

/// The names of all constants.
const NAMES: [&str; 26] = [
    "products.ampere",
    "products.hopper",
    "products.tpu-v4",
    "products.tpu-v5e",
    "attention.ampere",
    "attention.hopper",
    "attention.tpu",
    "short_sums",
    "short_sequences",
    "elementwise.eager",
    "elementwise.fused",
    "elementwise.by_hand",
    "elementwise.f32",
    "fp8",
    "attention.backward",
    "attention.triton",
    "copies",
    "congestion",
    "slices",
    "update",
    "network",
    "torus",
    "drag",
    "jitter",
    "slice_jitter",
    "outside",
];

/// Values of all constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Constants {
    values: BTreeMap<&'static str, f64>,
}

impl Constants {
    /// Returns the fitted constants.
    ///
    /// # Panics
    /// When the built-in file lacks a constant.
    pub fn fitted() -> Self {
        let table: BTreeMap<String, f64> =
            toml::from_str(FITTED).expect("constants.toml is written by a program");
        let value = |name: &'static str| (name, *table.get(name).expect("constants.toml has all constants"));
        Self { values: NAMES.map(value).into() }
    }

    /// Returns one constant.
    ///
    /// # Panics
    /// When there is no constant of this name.
    pub fn get(&self, name: &str) -> f64 {
        self.values[name]
    }

    /// Replaces one value.
    pub fn with(mut self, name: &'static str, value: f64) -> Self {
        self.values.insert(name, value);
        self
    }

    /// The constants that affect steps of this engine on a cluster without measurements.
    pub fn of(&self, cluster: &Cluster) -> Vec<(&'static str, f64)> {
        let generation = stand_in(&cluster.generation).unwrap_or(&cluster.generation);
        let is_tpu = cluster.kind == Kind::Tpu;
        let attention = if is_tpu { "tpu" } else { generation };
        let is_used = |name: &str| match name.split_once('.') {
            Some(("products", variant)) => variant == generation,
            Some(("attention", variant)) => variant == attention || variant == "backward",
            Some(("elementwise", variant)) => variant == "fused",
            Some(_) => false,
            None if matches!(name, "fp8" | "copies" | "update") => false,
            None if matches!(name, "torus" | "slices" | "slice_jitter") => is_tpu,
            None if matches!(name, "network" | "congestion" | "drag") => !is_tpu,
            None => true,
        };
        NAMES.into_iter().filter(|name| is_used(name)).map(|name| (name, self.values[name])).collect()
    }
}

/// The generation whose constants are used for a generation without fitted runs; `None` if it has constants of its own.
pub fn stand_in(generation: &str) -> Option<&'static str> {
    match generation {
        "blackwell" | "cdna3" => Some("hopper"),
        "tpu-v5p" => Some("tpu-v5e"),
        "x86" => Some("ampere"),
        _ => None,
    }
}
