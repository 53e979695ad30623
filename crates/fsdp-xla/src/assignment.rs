//! Assigns a device to each rank: devices of one process, or of several that a plugin connects.
//!
//! Ranks are in process order, and within a process in the order in which the plugin lists its devices. Device IDs may
//! come in any other order: programs are placed by the IDs of all ranks.

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
    /// The client for the devices of this process.
    pub(crate) client: Arc<Client>,
    /// The device ID of each rank.
    pub(crate) ids: Vec<u64>,
    /// The ranks of this process.
    pub(crate) local: Range<usize>,
}

/// Opens a plugin and creates a client for its devices.
///
/// # Errors
/// Any error of the plugin.
pub(crate) fn client(path: &Path, ranks: usize) -> Result<Arc<Client>, XlaError> {
    let plugin = Arc::new(Plugin::open(path)?);
    let client = Client::new(Arc::clone(&plugin), Vec::new())?;
    let [platform, _] = client.platform()?;
    if platform != "cpu" {
        return Ok(Arc::new(client));
    }
    // XLA's pool has one thread per device, or per core if there are more cores; with more devices than cores, threads
    // compete. The pool, and with it the blocking of products, is the same for all rank counts up to the number of
    // cores.
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let devices = ranks.max(cores) as i64;
    let options = vec![("cpu_device_count".to_owned(), Setting::Number(devices))];
    Ok(Arc::new(Client::new(plugin, options)?))
}

impl Assignment {
    /// Assigns devices of a plugin to `ranks` ranks, all in this process.
    ///
    /// # Errors
    /// Any error of the plugin; [`XlaError::Devices`] if there are fewer devices.
    pub(crate) fn single_process(path: &Path, ranks: usize) -> Result<Self, XlaError> {
        let client = client(path, ranks)?;
        let ids = client.ids()?;
        let all = 0..ids.len();
        Self { client, ids, local: all }.first(ranks)
    }

    /// Assigns all devices of a plugin to the ranks of an assembly that has no other user and whose processes hold
    /// equally many ranks. Of the GPUs that a process sees, it uses only the `visible` ones, if given.
    ///
    /// # Errors
    /// Any error of the plugin; [`XlaError::NoAnswer`]: other processes have not announced themselves within the limit;
    /// and [`XlaError::Unusable`], which all processes find alike: their compilers or devices do not fit together.
    pub(crate) fn among(
        path: &Path,
        assembly: &Arc<dyn Assembly>,
        visible: Option<Range<usize>>,
        limit: Duration,
    ) -> Result<Self, XlaError> {
        let (plugin, local) = (Arc::new(Plugin::open(path)?), assembly.local());
        let (process, processes) = (local.start / local.len(), assembly.world() / local.len());
        let options =
            if plugin.is_for_gpus() { node_options(process, processes, visible) } else { Vec::new() };
        let client = Client::among(plugin, options, Store::new(assembly))?;
        let all = exchange(&**assembly, process, &Announcement::of(&client)?, limit)?;
        expect_one_compiler(&all, local.len())?;
        let ([platform, _], path, ranks) = (client.platform()?, path.display(), local.len());
        // Each process has CPU devices of its own, even if it is told of the others.
        if platform == "cpu" {
            return Err(XlaError::Unusable(format!(
                "the plugin {path} ({platform}) has no collectives between processes: start one process, with all ranks in it"
            )));
        }
        if let Some(process) = all.iter().position(|announcement| announcement.ids.len() != ranks) {
            let devices = all[process].ids.len();
            return Err(XlaError::Unusable(format!(
                "process {process} of {processes} holds {ranks} ranks, which need a device each, but the plugin {path} \
                 ({platform}) gives it {devices}: if every process has as many, set `run.ranks` to {}",
                devices * processes
            )));
        }
        let ids: Vec<u64> = all.into_iter().flat_map(|announcement| announcement.ids).collect();
        if let Some(ranks) = shared_device(&ids) {
            let id = ids[ranks[0].0];
            let [one, other] = ranks;
            return Err(XlaError::Unusable(format!(
                "{one} and {other} would both have device {id} of the plugin {path} ({platform}), which has not connected \
                 their processes: TPUs of several hosts have to be one slice, which libtpu finds by itself on Google Cloud, \
                 and elsewhere by TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"
            )));
        }
        Ok(Self { client: Arc::new(client), ids, local })
    }

    /// The assignment of the first `ranks` ranks.
    ///
    /// # Errors
    /// [`XlaError::Devices`] if there are fewer devices.
    pub(crate) fn first(&self, ranks: usize) -> Result<Self, XlaError> {
        let (client, devices) = (Arc::clone(&self.client), self.ids.len());
        let Some(ids) = self.ids.get(..ranks) else {
            let [platform, _] = client.platform()?;
            return Err(XlaError::Devices { path: client.path().into(), platform, devices, ranks });
        };
        Ok(Self { client, ids: ids.to_vec(), local: self.local.start..self.local.end.min(ranks) })
    }

    /// The device IDs of this process, in rank order.
    pub(crate) fn local_ids(&self) -> &[u64] {
        &self.ids[self.local.clone()]
    }
}

/// The options that describe processes to XLA's GPU plugins, which call a process a node.
fn node_options(process: usize, processes: usize, visible: Option<Range<usize>>) -> Vec<(String, Setting)> {
    let number = |name: &str, number: usize| (name.to_owned(), Setting::Number(number as i64));
    let visible = visible.map(|gpus| {
        let numbers = gpus.map(|gpu| gpu as i64).collect();
        ("visible_devices".to_owned(), Setting::Numbers(numbers))
    });
    [number("node_id", process), number("num_nodes", processes)].into_iter().chain(visible).collect()
}

/// Finds two ranks with the same device.
fn shared_device(ids: &[u64]) -> Option<[Rank; 2]> {
    let mut owners = BTreeMap::new();
    ids.iter().enumerate().find_map(|(rank, id)| Some([owners.insert(id, Rank(rank))?, Rank(rank)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_sharing_device_are_found() {
        assert_eq!(shared_device(&[0, 1, 5, 4]), None);
        assert_eq!(shared_device(&[0, 1, 0, 1]), Some([Rank(0), Rank(2)]));
    }

    #[test]
    fn gpu_plugin_options_name_node_and_visible_devices() {
        let names = |options: Vec<(String, Setting)>| options.into_iter().map(|(name, _)| name);
        assert!(names(node_options(1, 2, None)).eq(["node_id", "num_nodes"]));
        assert_eq!(
            node_options(3, 4, Some(2..4))[2],
            ("visible_devices".to_owned(), Setting::Numbers(vec![2, 3]))
        );
    }
}
