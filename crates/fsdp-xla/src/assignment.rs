//! Which device each rank has: those of one process, or those of several that a plugin joins.
//!
//! Ranks follow each other in the order of processes, and within one in the order in which the plugin names its devices.
//! Numbers of devices may come in any other order: what a program runs on is said by these numbers, for all ranks.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::assembly::Assembly;
use fsdp_core::Rank;

use crate::announcement::{Announcement, exchange, expect_one_compiler};
use crate::error::XlaError;
use crate::ffi::{Client, Plugin, Setting};
use crate::store::Store;

/// The devices of ranks.
#[derive(Clone)]
pub(crate) struct Assignment {
    /// What reaches those of this process.
    pub(crate) client: Arc<Client>,
    /// The number of each rank's device.
    pub(crate) ids: Vec<u64>,
    /// The ranks of this process.
    pub(crate) local: Range<usize>,
}

/// The devices of a plugin.
///
/// # Errors
/// What the plugin says.
pub(crate) fn client(path: &Path, ranks: usize) -> Result<Arc<Client>, XlaError> {
    let plugin = Arc::new(Plugin::open(path)?);
    let client = Client::new(Arc::clone(&plugin), Vec::new())?;
    let [platform, _] = client.platform()?;
    if platform != "cpu" {
        return Ok(Arc::new(client));
    }
    // XLA's pool has a thread for each device, or for each core if there are more: with more devices than cores its threads are
    // in each other's way. And the pool, with it the blocking of products, is the same for all ranks up to the cores.
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let devices = ranks.max(cores) as i64;
    let options = vec![("cpu_device_count".to_owned(), Setting::Number(devices))];
    Ok(Arc::new(Client::new(plugin, options)?))
}

impl Assignment {
    /// So many ranks, all in this process, on the devices of a plugin.
    ///
    /// # Errors
    /// What the plugin says; [`XlaError::Devices`] when there are fewer.
    pub(crate) fn alone(path: &Path, ranks: usize) -> Result<Self, XlaError> {
        let client = client(path, ranks)?;
        let ids = client.ids()?;
        let all = 0..ids.len();
        Self { client, ids, local: all }.first(ranks)
    }

    /// The ranks of an assembly that nobody else uses, whose processes hold equally many, on all devices of a plugin. Of the GPUs
    /// that a process sees it takes the `visible` ones, if that is said.
    ///
    /// # Errors
    /// What the plugin says; [`XlaError::NotHeard`]: others have not said within the limit what they have; and what all
    /// processes find alike: [`XlaError::OtherCompiler`], [`XlaError::Unconnected`], [`XlaError::OwnDevices`],
    /// [`XlaError::SameDevice`].
    pub(crate) fn among(
        path: &Path,
        assembly: &Arc<dyn Assembly>,
        visible: Option<Range<usize>>,
        limit: Duration,
    ) -> Result<Self, XlaError> {
        let (plugin, local) = (Arc::new(Plugin::open(path)?), assembly.local());
        let (process, processes) = (local.start / local.len(), assembly.world() / local.len());
        let options = if plugin.is_for_gpus() { of_node(process, processes, visible) } else { Vec::new() };
        let client = Client::among(plugin, options, Store::new(assembly))?;
        let all = exchange(&**assembly, process, &Announcement::of(&client)?, limit)?;
        expect_one_compiler(&all, local.len())?;
        let ([platform, _], path, ranks) = (client.platform()?, path.to_owned(), local.len());
        // Of processors each process has its own, whatever it is told of others.
        if platform == "cpu" {
            return Err(XlaError::Unconnected { path, platform });
        }
        if let Some(process) = all.iter().position(|said| said.ids.len() != ranks) {
            let devices = all[process].ids.len();
            return Err(XlaError::OwnDevices { path, platform, process, processes, devices, ranks });
        }
        let ids: Vec<u64> = all.into_iter().flat_map(|said| said.ids).collect();
        if let Some(ranks) = same(&ids) {
            let id = ids[ranks[0].0];
            return Err(XlaError::SameDevice { path, platform, ranks, id });
        }
        Ok(Self { client: Arc::new(client), ids, local })
    }

    /// That of the first ranks.
    ///
    /// # Errors
    /// [`XlaError::Devices`] when there are fewer devices.
    pub(crate) fn first(&self, ranks: usize) -> Result<Self, XlaError> {
        let (client, devices) = (Arc::clone(&self.client), self.ids.len());
        let Some(ids) = self.ids.get(..ranks) else {
            let [platform, _] = client.platform()?;
            return Err(XlaError::Devices { path: client.path().into(), platform, devices, ranks });
        };
        Ok(Self { client, ids: ids.to_vec(), local: self.local.start..self.local.end.min(ranks) })
    }

    /// The numbers of the devices of this process, in the order of its ranks.
    pub(crate) fn own_ids(&self) -> &[u64] {
        &self.ids[self.local.clone()]
    }
}

/// What XLA's plugins for GPUs are told of processes: a node is one of these to them.
fn of_node(process: usize, processes: usize, visible: Option<Range<usize>>) -> Vec<(String, Setting)> {
    let number = |name: &str, number: usize| (name.to_owned(), Setting::Number(number as i64));
    let visible = visible.map(|gpus| {
        let numbers = gpus.map(|gpu| gpu as i64).collect();
        ("visible_devices".to_owned(), Setting::Numbers(numbers))
    });
    [number("node_id", process), number("num_nodes", processes)].into_iter().chain(visible).collect()
}

/// Two ranks that have the same device.
fn same(ids: &[u64]) -> Option<[Rank; 2]> {
    let mut owners = BTreeMap::new();
    ids.iter().enumerate().find_map(|(rank, id)| Some([owners.insert(id, Rank(rank))?, Rank(rank)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_the_same_device_are_found() {
        assert_eq!(same(&[0, 1, 5, 4]), None);
        assert_eq!(same(&[0, 1, 0, 1]), Some([Rank(0), Rank(2)]));
    }

    #[test]
    fn a_plugin_for_gpus_is_told_of_its_node() {
        let names = |options: Vec<(String, Setting)>| options.into_iter().map(|(name, _)| name);
        assert!(names(of_node(1, 2, None)).eq(["node_id", "num_nodes"]));
        assert_eq!(
            of_node(3, 4, Some(2..4))[2],
            ("visible_devices".to_owned(), Setting::Numbers(vec![2, 3]))
        );
    }
}
