//! The mesh of `accelerate launch`: with version 2 of FSDP, it holds the number of replicas (HSDP).

use serde_json::Value;
use toml::Table;

use super::{File, MESH, PARALLELISM};
use crate::error::ConfigError;

/// The size that is `fsdp.mesh.replicate`.
pub(super) const REPLICAS: &str = "dp_replicate_size";

/// The number of ranks of a replica, which follows from the number of all ranks.
const SHARDS: &str = "dp_shard_size";

/// Ranks that share a layer or a sequence.
const UNSUPPORTED: [&str; 4] = ["tp_size", "cp_size", "sp_size", "ep_size"];

impl File<'_> {
    pub(super) fn parallelism(&mut self) -> Result<(), ConfigError> {
        let object = |value: &Value| value.as_object().cloned();
        for (written, value) in self.take(PARALLELISM, "an object", object)?.unwrap_or_default() {
            let key = written.strip_prefix("parallelism_config_").unwrap_or(&written).to_owned();
            let dotted = format!("{PARALLELISM}.{key}");
            self.keys.insert(dotted.clone(), value);
            match &*key {
                REPLICAS => {
                    let replicas = self.take(&dotted, "an integer of at least 1", size)?;
                    if let Some(replicas) = replicas.filter(|&replicas| replicas > 1) {
                        self.set(MESH, Table::from_iter([("replicate".to_owned(), replicas.into())]));
                    }
                }
                SHARDS => drop(self.take(&dotted, "an integer of at least 1", size)?),
                key if UNSUPPORTED.contains(&key) => {
                    let one = |value: &Value| size(value).filter(|&size| size == 1);
                    self.take(&dotted, "1: layers and sequences are not split over ranks", one)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn size(value: &Value) -> Option<i64> {
    value.as_i64().filter(|&size| size >= 1)
}
