//! Messages between a node's agent and the coordinator of a launch. Between nodes, each is a line of JSON.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::exit_code::Exit;

/// A node's description of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeFacts {
    /// Its host name, for messages to users.
    pub(super) host: String,
    /// Its requested position among the nodes, if any.
    pub(super) number: Option<usize>,
    /// Number of processes that it starts.
    pub(super) nproc: usize,
    /// Its requested address for other nodes; by default the address of its agent's connection.
    pub(super) address: Option<IpAddr>,
    /// A port that was free a moment ago, for its process 0.
    pub(super) port: u16,
    /// The last state received from a lost coordinator.
    pub(super) known: Known,
}

/// A message from an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The node is present and runs nothing.
    Join(NodeFacts),
    /// All processes of an attempt on this node have ended.
    Ended {
        /// Number of the attempt.
        attempt: u32,
        /// Their joint exit code.
        code: u8,
        /// The first failure, if any.
        because: Option<String>,
        /// Whether a process was killed by a signal, and so did not stop on request.
        was_killed: bool,
        /// Whether the processes were told of a failure, which those of other nodes then were too.
        is_notified: bool,
        /// Whether the state of the run is outside of its output folder.
        is_elsewhere: bool,
        /// A port that was free a moment ago.
        port: u16,
    },
    /// The output folder now belongs to this run.
    TakenOver,
    /// The node was asked to stop, and no longer takes part.
    Leave,
    /// A heartbeat.
    Pulse,
}

/// An order from the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Start the processes of an attempt.
    Start(Start),
    /// Let the processes save and stop.
    Stop,
    /// Let the processes save and stop when the next checkpoint is complete.
    StopAtSave,
    /// The attempt has failed: end its remaining processes after a grace period.
    End {
        /// Whether its processes were told of a failure and need no time to detect it.
        is_notified: bool,
    },
    /// The launch is over.
    Finish {
        /// The exit code.
        code: u8,
        /// The reason to print, if any.
        because: Option<String>,
    },
    /// A heartbeat. If the coordinator is lost, another one continues from this state.
    Pulse(Known),
}

/// The state on which the next attempt of a launch depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    /// Number of attempts so far.
    pub(super) attempts: u32,
    /// Number of failures after which processes were restarted.
    pub(super) restarts: u32,
    /// Whether the output folder has belonged to this run in any attempt.
    pub(super) is_taken_over: bool,
}

/// A node's part in an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Start {
    /// Number of the attempt, from 0, counted over all coordinators of a launch.
    pub(super) attempt: u32,
    /// Index of the node in the attempt.
    pub(super) node: usize,
    /// Number of nodes in the attempt.
    pub(super) nodes: usize,
    /// How the run begins.
    pub(super) beginning: Beginning,
    /// The address of process 0, if there are several nodes.
    pub(super) rendezvous: Option<String>,
}

/// How the run begins in an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Beginning {
    /// As requested: the output folder belongs to another run, if any.
    AsRequested,
    /// As requested, overwriting its own earlier output: it has no checkpoint yet.
    Overwrite,
    /// From its newest checkpoint.
    Resume,
}

/// Converts an exit code received from a peer.
pub(super) fn exit_of(code: u8) -> Exit {
    Exit::of_code(code.into()).unwrap_or(Exit::Failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_round_trips_as_single_line() {
        let order =
            Order::Finish { code: 75, because: Some("node \"a\"\nwas killed by signal 9".to_owned()) };
        let text = serde_json::to_string(&order).unwrap();
        assert!(!text.contains('\n'), "{text}");
        assert_eq!(serde_json::from_str::<Order>(&text).unwrap(), order);
        assert_eq!([0, 75, 9].map(exit_of), [Exit::Done, Exit::Temporary, Exit::Failed]);
    }
}
