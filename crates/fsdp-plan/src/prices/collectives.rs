//! Durations of collectives: a startup time, hops, and bytes over the slowest link of a ring.

use fsdp_core::{Axis, Group, Mesh};
use fsdp_sim::virtual_time::Work;

use super::{NETWORK, NODE_LINK, Prices, link_reached};
use crate::cluster::{Kind, LinkKind};

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank receives all shards.
    AllGather,
    /// Every rank receives its shard of a sum.
    ReduceScatter,
    /// Every rank receives a sum.
    AllReduce,
}

impl Collective {
    /// All kinds.
    pub const ALL: [Self; 3] = [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce];

    /// The name in [points](crate::measured).
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllGather => "all-gather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllReduce => "all-reduce",
        }
    }

    /// Number of times that the bytes pass around a ring.
    const fn passes(self) -> f64 {
        match self {
            Collective::AllGather | Collective::ReduceScatter => 1.0,
            Collective::AllReduce => 2.0,
        }
    }
}

/// Seconds before a collective within one node begins to move bytes (NCCL's launch).
const STARTUP_SECONDS: f64 = 9e-6;

/// The smallest fraction of network bandwidth that remains with many nodes.
const MIN_NETWORK_FRACTION: f64 = 0.3;

/// The ranks of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    /// Number of ranks.
    pub(super) ranks: usize,
    /// The distance of neighbors in the ring; those between them are in rings of their own, at the same time.
    pub(super) stride: usize,
}

impl Ring {
    /// The ring of a group of a mesh.
    pub(super) fn of(mesh: Mesh, group: Group) -> Self {
        Self { ranks: mesh.group_size(group), stride: mesh.stride(group) }
    }

    /// Number of nodes that its ranks are on.
    pub(super) fn nodes(self, per_node: usize) -> usize {
        ((self.ranks - 1) * self.stride + 1).div_ceil(per_node).min(self.ranks)
    }

    /// Neighboring ranks.
    pub(super) const fn near(ranks: usize) -> Self {
        Self { ranks, stride: 1 }
    }
}

impl Prices<'_> {
    /// The cost of a collective over a ring; `bytes` is the unsharded size of what is gathered or reduced.
    pub(super) fn collective(&self, collective: Collective, bytes: f64, ring: Ring) -> Work {
        let specified = self.ring(collective.passes(), bytes, ring);
        match self.estimate_collective(collective, bytes, ring) {
            // The drag on computation comes from the traffic, which is the same.
            Some(seconds) => {
                Work { seconds, drag: specified.drag * specified.seconds / seconds, ..specified }
            }
            None => specified,
        }
    }

    /// The cost according to the specification of the links.
    fn ring(&self, passes: f64, bytes: f64, ring: Ring) -> Work {
        let (group, per_node) = (ring.ranks, self.cluster.devices_per_node());
        if group < 2 {
            return Work::default();
        }
        let moved = bytes * (group - 1) as f64 / group as f64;
        let link = &self.cluster.node.link;
        if link.kind == LinkKind::Torus {
            let hops = (group as f64).sqrt() * link.latency.value * 5.0;
            let seconds = hops + moved / (link.bandwidth.value * self.constants.get("torus"));
            return Work { seconds: passes * seconds, link: Some(NODE_LINK), drag: 0.0 };
        }
        let nodes = ring.nodes(per_node);
        let bus = self.node_bus();
        let (slowest, link_number) = match self.network_bus(nodes) {
            // The rings of a node share its network.
            Some(network) if nodes > 1 => ((network / ring.stride.min(per_node) as f64).min(bus), NETWORK),
            _ => (bus, NODE_LINK),
        };
        let latency = self.cluster.network.as_ref().map_or(0.0, |network| network.latency.value);
        let hops = (group - nodes) as f64 * link.latency.value + (nodes - 1) as f64 * 2.0 * latency;
        let seconds = passes * (STARTUP_SECONDS + hops + moved / slowest);
        let drag = self.constants.get("drag") * passes * moved / bus / seconds;
        Work { seconds, link: Some(link_number), drag }
    }

    /// The cost of an all-reduce of the shards of replicas, `bytes` each.
    pub(super) fn replicated(&self, bytes: f64, mesh: Mesh) -> Work {
        let (replicas, shards) = (mesh.size(Axis::Replicate), mesh.shards());
        if replicas < 2 {
            return Work::default();
        }
        let moved = 2.0 * bytes * (replicas - 1) as f64 / replicas as f64;
        if self.cluster.kind == Kind::Tpu {
            let seconds = moved / self.constants.get("slices");
            return Work { seconds, link: Some(NETWORK), drag: 0.0 };
        }
        let per_node = self.cluster.devices_per_node();
        if shards == 1 || mesh.world() <= per_node {
            let group = if shards == 1 || self.measured().is_some() { replicas } else { mesh.world() };
            return self.collective(Collective::AllReduce, bytes, Ring::near(group));
        }
        // Every device of a node is in its own ring, and has its share of the network.
        let network = self.cluster.network.as_ref();
        let (bandwidth, latency) =
            network.map_or((f64::INFINITY, 0.0), |network| (network.bandwidth.value, network.latency.value));
        let share = bandwidth / per_node as f64 * self.constants.get("network");
        let seconds = 2.0 * (2.0 * STARTUP_SECONDS + (replicas - 1) as f64 * 2.0 * latency) + moved / share;
        let drag = self.constants.get("drag") * moved / self.node_bus() / seconds;
        Work { seconds, link: Some(NETWORK), drag }
    }

    /// Bandwidth of a ring within a node, in bytes per second.
    fn node_bus(&self) -> f64 {
        let link = &self.cluster.node.link;
        link.bandwidth.value * link_reached(link.kind)
    }

    /// Bandwidth of a ring through this many nodes, in bytes per second; `None` without a network.
    fn network_bus(&self, nodes: usize) -> Option<f64> {
        let network = self.cluster.network.as_ref()?;
        let lost = self.constants.get("congestion") * (nodes as f64).log2();
        Some(network.bandwidth.value * self.constants.get("network") * (1.0 - lost).max(MIN_NETWORK_FRACTION))
    }
}
