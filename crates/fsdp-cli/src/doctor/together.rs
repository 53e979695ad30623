//! The processes of a launch examine themselves, each other, and the resources they share.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use fsdp_comm::process::cluster::{cpu_model, host};
use fsdp_comm::process::interface::interfaces;
use fsdp_config::{RunConfig, XlaConfig};
use fsdp_cuda::doctor::{Finding, Status};
use fsdp_mpi::MpiLibrary;
use serde::{Deserialize, Serialize};

use super::folder::{self, Lock, View};
use super::links::{Clock, LinkProbe, PARTNERS_MAX, Pair};
use super::process_group::ProcessGroup;
use super::{Usable, devices, findings};
use crate::cluster::{self, Team};
use crate::error::CliError;

/// A larger clock difference confuses readers of logs from several nodes.
const AHEAD_MS_MAX: f64 = 1000.0;

/// A longer delay until writes are visible is reported.
const SEEN_MS_MAX: f64 = 1000.0;

/// The joint findings.
#[derive(Debug, Serialize)]
pub(super) struct Together {
    /// The version of fsdp; processes of another version are rejected.
    pub(super) version: String,
    /// The launcher of the processes; `None` for a single process.
    pub(super) launcher: Option<Launched>,
    pub(super) processes: usize,
    /// How they found each other.
    pub(super) found_by: Option<String>,
    pub(super) transport: String,
    pub(super) nodes: Vec<Node>,
    pub(super) links: Vec<Pair>,
    /// Number of partners each node was measured with; `None` if all.
    pub(super) sampled: Option<usize>,
    /// The folder that was examined.
    pub(super) out_dir: String,
    /// What to know before a run.
    pub(super) warnings: Vec<String>,
    /// What would make a run fail.
    pub(super) broken: Vec<String>,
}

/// A detected launcher.
#[derive(Debug, Serialize)]
pub(super) struct Launched {
    pub(super) name: String,
    /// The variables that identify it, with their values in process 0.
    pub(super) variables: BTreeMap<String, String>,
}

/// A node.
#[derive(Debug, Serialize)]
pub(super) struct Node {
    /// Its host name; with its first process, if several nodes have the same name.
    pub(super) name: String,
    pub(super) host: String,
    /// The index of its first process; its processes are consecutive.
    pub(super) first_process: usize,
    pub(super) processes: usize,
    pub(super) cpu: String,
    /// Its addresses, with their interfaces.
    pub(super) interfaces: Vec<String>,
    pub(super) libraries: Vec<Library>,
    pub(super) devices: Vec<Usable>,
    pub(super) clock: Option<Clock>,
    pub(super) out_dir: View,
}

/// The state of a library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Library {
    pub(super) part: String,
    pub(super) is_good: bool,
    /// Its version, or what is wrong.
    pub(super) state: String,
}

impl From<Finding> for Library {
    fn from(found: Finding) -> Self {
        let state = match found.status {
            Status::Found => found.version.unwrap_or_else(|| "found".to_owned()),
            Status::Missing => "not found".to_owned(),
            Status::Unusable => format!("unusable: {}", found.detail),
        };
        Self { part: found.part, is_good: found.status == Status::Found, state }
    }
}

/// A process's description of itself.
#[derive(Serialize, Deserialize)]
struct ProcessReport {
    host: String,
    cpu: String,
    interfaces: Vec<String>,
    /// Set by the first process of each node.
    node: Option<(Vec<Library>, Vec<Usable>)>,
}

/// Examines everything, in all processes; returns the findings in the first one, and in all whether a run could work.
///
/// # Errors
/// [`CliError`]: a process is lost, or does not answer.
pub(super) fn examine(
    team: Option<Team<'_>>,
    config: &RunConfig,
) -> Result<(bool, Option<Together>), CliError> {
    let group = ProcessGroup::of(team);
    let place = team.map(|team| team.cluster.place());
    let is_first_of_node = place.is_none_or(|place| place.local_process == 0);
    let all = group.gather("processes", &process_report(team, &config.xla, is_first_of_node))?;
    let leaders =
        |all: &Vec<ProcessReport>| (0..all.len()).filter(|&process| all[process].node.is_some()).collect();
    let node_leaders: Vec<usize> = group.share("nodes", all.as_ref().map(leaders))?;
    let (clocks, links) = match team {
        Some(team) => {
            let mut probe = LinkProbe::new(team.cluster);
            (probe.clocks(&group, &node_leaders)?, probe.pairs(&group, &node_leaders)?)
        }
        None => (Vec::new(), Some(Vec::new())),
    };
    let views = folder::examine(&group, Path::new(&config.out_dir), is_first_of_node)?;
    let found = all.zip(links).zip(views).map(|((all, links), views)| {
        let processes = all.len();
        let mut found = Together {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            launcher: team.map(launched),
            processes,
            found_by: team.map(|team| team.cluster.met_by().to_owned()),
            transport: team.map_or_else(|| "threads".to_owned(), |team| team.transport()),
            nodes: nodes(all, &clocks, views),
            links,
            sampled: (node_leaders.len() > PARTNERS_MAX + 1).then_some(PARTNERS_MAX),
            out_dir: config.out_dir.clone(),
            warnings: Vec::new(),
            broken: Vec::new(),
        };
        found.judge();
        found
    });
    let works = group.share("verdict", found.as_ref().map(|found| found.broken.is_empty()))?;
    Ok((works, found))
}

fn process_report(team: Option<Team<'_>>, xla_config: &XlaConfig, is_first_of_node: bool) -> ProcessReport {
    let addresses: Vec<IpAddr> = team.map_or_else(Vec::new, |team| {
        let cluster = team.cluster;
        let facts = &cluster.roster().processes[cluster.place().process].facts;
        facts.addresses.iter().map(|address| address.ip()).collect()
    });
    let known = interfaces().unwrap_or_default();
    let labeled = |address: &IpAddr| {
        let found = known.iter().find(|interface| interface.address == *address);
        found.map_or(address.to_string(), |interface| format!("{} {address}", interface.name))
    };
    let node = is_first_of_node.then(|| {
        let found = findings(xla_config);
        let devices = devices(&found, xla_config, team.is_none());
        (found.into_iter().chain([mpi()]).map(Library::from).collect(), devices)
    });
    ProcessReport {
        host: host(),
        cpu: cpu_model(),
        interfaces: addresses.iter().map(labeled).collect(),
        node,
    }
}

fn mpi() -> Finding {
    match MpiLibrary::find() {
        Ok(library) => {
            let version = library.version().lines().next().unwrap_or_default().to_owned();
            Finding::found("MPI", Some(version), Some(library.path().to_owned()))
        }
        Err(error) => Finding::bad("MPI", Status::Missing, error.to_string()),
    }
}

fn launched(team: Team<'_>) -> Launched {
    let launched_by = team.cluster.place().launched_by;
    let value = |name: &&'static str| Some(((*name).to_owned(), cluster::variable(name)?));
    let variables = launched_by.variables().iter().filter_map(value).collect();
    Launched { name: launched_by.to_string(), variables }
}

fn nodes(all: Vec<ProcessReport>, clocks: &[Clock], views: Vec<Option<View>>) -> Vec<Node> {
    let mut nodes: Vec<Node> = Vec::new();
    for (process, (ProcessReport { host, cpu, interfaces, node }, view)) in
        all.into_iter().zip(views).enumerate()
    {
        match node {
            Some((libraries, devices)) => nodes.push(Node {
                name: host.clone(),
                host,
                first_process: process,
                processes: 1,
                cpu,
                interfaces,
                libraries,
                devices,
                clock: clocks.get(nodes.len()).copied(),
                out_dir: view.unwrap_or_default(),
            }),
            None => nodes.last_mut().expect("process 0 is the first of its node").processes += 1,
        }
    }
    let hosts: Vec<String> = nodes.iter().map(|node| node.host.clone()).collect();
    for node in &mut nodes {
        if hosts.iter().filter(|host| **host == node.host).count() > 1 {
            node.name = format!("{}:{}", node.host, node.first_process);
        }
    }
    nodes
}

impl Together {
    /// Determines what is wrong, and on which nodes.
    pub(super) fn judge(&mut self) {
        let (mut warnings, mut broken) = (Vec::new(), Vec::new());
        let cpus = self.nodes_by(|node| node.cpu.clone());
        if cpus.len() > 1 {
            let cpus: Vec<String> =
                cpus.iter().map(|(cpu, on)| format!("{cpu} ({})", on.join(", "))).collect();
            warnings.push(format!(
                "the nodes have different CPUs: {}; equal bits are promised only on CPUs of one model",
                cpus.join("; ")
            ));
        }
        for node in &self.nodes {
            let Node { name, clock, out_dir: View { seen_after_ms, lock, faults, .. }, .. } = node;
            broken.extend(faults.iter().map(|fault| format!("{name}: {fault}")));
            let lock_problem = match lock {
                Some(Lock::Excludes) | None => None,
                Some(Lock::Ignored) => Some("a lock held by process 0 has no effect"),
                Some(Lock::Unsupported) => Some("locks are not supported"),
            };
            warnings.extend(lock_problem.map(|what| {
                format!("{name}: {what} in {}: a second run there would not be noticed", self.out_dir)
            }));
            if let Some(after) = seen_after_ms.filter(|&after| after > SEEN_MS_MAX) {
                let seconds = after / 1e3;
                warnings.push(format!(
                    "{name} sees a file that process 0 writes to {} only after {seconds:.1} s",
                    self.out_dir
                ));
            }
            if let Some(Clock { ahead_ms, uncertainty_ms }) = clock
                && ahead_ms.abs() > AHEAD_MS_MAX + uncertainty_ms
            {
                let (seconds, direction) =
                    (ahead_ms.abs() / 1e3, if *ahead_ms > 0.0 { "ahead of" } else { "behind" });
                warnings.push(format!("the clock of {name} is {seconds:.1} s {direction} that of process 0"));
            }
        }
        for (part, states) in self.libraries() {
            if states.len() > 1 {
                warnings.push(format!("the nodes have different versions of {part}"));
            }
        }
        (self.warnings, self.broken) = (warnings, broken);
    }

    /// Groups nodes by a property.
    pub(super) fn nodes_by<K: Ord>(&self, property: impl Fn(&Node) -> K) -> BTreeMap<K, Vec<&str>> {
        let mut groups: BTreeMap<K, Vec<&str>> = BTreeMap::new();
        self.nodes.iter().for_each(|node| groups.entry(property(node)).or_default().push(&node.name));
        groups
    }

    /// For each library, its states and the nodes with each.
    pub(super) fn libraries(&self) -> Vec<(&str, BTreeMap<&str, Vec<&str>>)> {
        let mut parts: Vec<&str> = Vec::new();
        for library in self.nodes.iter().flat_map(|node| &node.libraries) {
            if !parts.contains(&&*library.part) {
                parts.push(&library.part);
            }
        }
        let states = |part: &&str| {
            let mut states: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for node in &self.nodes {
                let found = node.libraries.iter().find(|library| library.part == **part);
                states.entry(found.map_or("not found", |found| &found.state)).or_default().push(&node.name);
            }
            states
        };
        parts.iter().map(|part| (*part, states(part))).collect()
    }
}
