//! What the agent of a node and the coordinator of a launch say to each other. Between nodes: a line of JSON each.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::exit_code::Exit;

/// What a node brings to a launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeFacts {
    /// Its name, for people.
    pub(super) host: String,
    /// Where it wants to be among the nodes, if it knows.
    pub(super) number: Option<usize>,
    /// Processes that it starts.
    pub(super) nproc: usize,
    /// Where other nodes reach it, if that was asked for: else by the address that they reach its agent by.
    pub(super) address: Option<IpAddr>,
    /// A port that was free a moment ago, for its process 0.
    pub(super) port: u16,
    /// What it knows of the launch, of a coordinator that is lost.
    pub(super) known: Known,
}

/// What an agent says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// It is there, and has nothing running.
    Join(NodeFacts),
    /// All processes of an attempt that were here have ended.
    Ended {
        /// The attempt.
        attempt: u32,
        /// What they come to, as an exit code.
        code: u8,
        /// What happened first, if something failed.
        because: Option<String>,
        /// Whether a process was killed by a signal: then it did not stop because it was asked to.
        was_killed: bool,
        /// Whether the processes were told of a failure: then those of other nodes were too.
        is_told: bool,
        /// Whether the state of the run is not in its output folder.
        is_elsewhere: bool,
        /// A port that was free a moment ago.
        port: u16,
    },
    /// The output folder is the run's from now on.
    TakenOver,
    /// It was asked to stop, and takes part no longer.
    Leave,
    /// It is alive.
    Pulse,
}

/// What the coordinator says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Start the processes of an attempt.
    Start(Start),
    /// Let the processes save and stop.
    Stop,
    /// Let them do so when the next checkpoint is complete.
    StopAtSave,
    /// The attempt has failed: end what is left of it after a moment.
    End {
        /// Whether its processes were told of a failure, and need no time to notice it.
        is_told: bool,
    },
    /// The launch is over, with this exit code, and why if a person should know.
    Finish {
        /// The code.
        code: u8,
        /// Why.
        because: Option<String>,
    },
    /// The coordinator is alive. Should it be lost, another one goes on from what it knows.
    Pulse(Known),
}

/// What the next attempt of a launch depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    /// Attempts so far.
    pub(super) attempts: u32,
    /// Failures after which processes were started again.
    pub(super) restarts: u32,
    /// Whether the output folder was the run's in one of them.
    pub(super) is_taken_over: bool,
}

/// The part of a node in an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Start {
    /// Counted from 0, over all coordinators of a launch.
    pub(super) attempt: u32,
    /// The number of the node in it.
    pub(super) node: usize,
    /// How many there are.
    pub(super) nodes: usize,
    /// How the run begins.
    pub(super) beginning: Beginning,
    /// Where process 0 can be reached, if there are several nodes.
    pub(super) rendezvous: Option<String>,
}

/// How the run of an attempt begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Beginning {
    /// As it was asked to: what is in the output folder is another run's.
    AsAsked,
    /// As it was asked to, over what it has left itself: there is no checkpoint of it.
    Over,
    /// From its newest checkpoint.
    Resume,
}

/// The exit that a code of the other end stands for.
pub(super) fn exit_of(code: u8) -> Exit {
    Exit::of_code(code.into()).unwrap_or(Exit::Failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_comes_through_as_a_line() {
        let order =
            Order::Finish { code: 75, because: Some("node \"a\"\nwas killed by signal 9".to_owned()) };
        let text = serde_json::to_string(&order).unwrap();
        assert!(!text.contains('\n'), "{text}");
        assert_eq!(serde_json::from_str::<Order>(&text).unwrap(), order);
        assert_eq!([0, 75, 9].map(exit_of), [Exit::Done, Exit::Temporary, Exit::Failed]);
    }
}
